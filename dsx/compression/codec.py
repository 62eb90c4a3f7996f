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

    def encode_with_residual(
        self, name: str, value: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The body, and `value - decode(body)` (fp32, shape and device of `value`).

        With `overwrite` the latter is written over `value`, which must be fp32, and is returned.
        """
        ...

    def decode(self, body: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        """The fp32 CPU tensor of `shape` that `body` (uint8, 1-D, CPU) stands for.

        Args:
            body: What `encode` gave, or anything.
            shape: Of the tensor.
            out: Where to put it, if given: fp32, contiguous, of that shape, on the CPU.

        Raises:
            ExchangeError: `body` can't be one of that shape. No memory beyond that of the shape
                is allocated, whatever the bytes say. What `out` holds then is undefined.
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


def to_overwrite(value: Tensor, overwrite: bool) -> tuple[Tensor, Tensor]:
    """The tensor that is to become the residual, contiguous if new, and its entries, 1-D.

    The entries of a `value` with gaps in memory are a copy: `written_back` returns them to it.
    """
    if not overwrite:
        value = value.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    elif value.dtype != torch.float32:
        raise ValueError(f"only fp32 can be overwritten by its residual, not {value.dtype}")
    return value, value.reshape(-1)


def written_back(flat: Tensor, target: Tensor) -> Tensor:
    """`target`, after making sure that it holds what `flat` (from `to_overwrite`) holds."""
    if flat.data_ptr() != target.data_ptr() or not target.is_contiguous():
        target.copy_(flat.view(target.shape))
    return target


def finite(value: Tensor) -> bool:
    """Whether `value` holds neither NaN nor infinity (one pass, no temporary of its size)."""
    if value.numel() == 0:
        return True
    low, high = torch.aminmax(value.detach())
    return math.isfinite(float(low)) and math.isfinite(float(high))
