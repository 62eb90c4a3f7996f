"""What every codec of named tensors can do."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsx.errors import CheckpointError
from dsx.settings.codec_block import CodecSettings


class Codec(Protocol):
    """Turns one tensor into bytes and back.

    Encoding changes nothing that matters to a later call: a round may be encoded again. What a
    codec learns from a round (the warm start of `LowRank`) it stages, and takes over in `commit`.
    """

    @property
    def settings(self) -> CodecSettings:
        """What it was built from; also what its messages say about themselves."""
        ...

    def encode(self, name: str, value: Tensor) -> Tensor:
        """The body of `value` (fp32 or bf16, finite, any shape, device and strides): uint8, 1-D,
        on the CPU. It may share memory with `value`."""
        ...

    def encode_with_residual(self, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        """The body, and `value - decode(body)` (fp32, shape and device of `value`)."""
        ...

    def decode(self, body: Tensor, shape: Sequence[int]) -> Tensor:
        """The fp32 CPU tensor of `shape` that `body` (uint8, 1-D, CPU) stands for.

        Raises:
            ExchangeError: `body` can't be one of that shape. No memory beyond that of the shape
                is allocated, whatever the bytes say.
        """
        ...

    def most_bytes(self, shape: Sequence[int]) -> int:
        """Length of the longest body of a tensor of that shape."""
        ...

    def commit(self, name: str) -> None:
        """The last encoding of `name` has become part of a committed round."""
        ...

    def discard(self, name: str) -> None:
        """The last encoding of `name` never will."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What `commit` has left, by tensor name; fp32 CPU tensors."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` gave."""
        ...


class Stateless:
    """The part of the protocol that codecs without a memory share."""

    def commit(self, name: str) -> None:
        pass

    def discard(self, name: str) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            raise CheckpointError(f"this codec has no state, but {len(state)} tensors of it came")


def finite(value: Tensor) -> bool:
    """Whether `value` holds neither NaN nor infinity (one pass, no temporary of its size)."""
    if value.numel() == 0:
        return True
    low, high = torch.aminmax(value.detach())
    return math.isfinite(float(low)) and math.isfinite(float(high))
