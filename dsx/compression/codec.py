"""Codecs of named tensors: the protocol, the plain one, and how settings become codecs."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsx.compression.levels import INT2, INT4, INT8, SIGN
from dsx.compression.quantizers import Bf16, Blockwise, Fp16, Fp32, Quantizer
from dsx.compression.rows import (
    encode_row_map,
    has_row_map,
    live_rows,
    matrix_shape,
    split_row_map,
)
from dsx.errors import ExchangeError
from dsx.settings.codec_block import (
    Bf16Codec,
    BlockwiseCodec,
    CodecSettings,
    Fp16Codec,
    LowRankCodec,
    NoneCodec,
    QuantizerSettings,
    TopKCodec,
)

_LEVELS = {levels.name: levels for levels in (INT8, INT4, INT2, SIGN)}


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
            raise ExchangeError(f"this codec has no state, but {len(state)} tensors of it came")


class Dense(Stateless):
    """Every entry, through a quantizer; all-zero rows are left out where that matters."""

    def __init__(self, settings: QuantizerSettings, quantizer: Quantizer) -> None:
        self._settings = settings
        self.quantizer = quantizer

    @property
    def settings(self) -> QuantizerSettings:
        return self._settings

    def encode(self, name: str, value: Tensor) -> Tensor:
        return self._encode(value, want_residual=False)[0]

    def encode_with_residual(self, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        body, residual = self._encode(value, want_residual=True)
        assert residual is not None
        return body, residual

    def decode(self, body: Tensor, shape: Sequence[int]) -> Tensor:
        if not self._maps_rows(shape):
            return self.quantizer.decode(body, math.prod(shape)).view(tuple(shape))
        rows, length = matrix_shape(shape)
        body, live = split_row_map(body, rows)
        if live is None:
            return self.quantizer.decode(body, rows * length).view(tuple(shape))
        values = self.quantizer.decode(body, live.numel() * length)
        out = torch.zeros(rows, length)
        out[live] = values.view(-1, length)
        return out.view(tuple(shape))

    def most_bytes(self, shape: Sequence[int]) -> int:
        note = 1 + -(-matrix_shape(shape)[0] // 8) if self._maps_rows(shape) else 0
        return self.quantizer.body_bytes(math.prod(shape)) + note

    def _encode(self, value: Tensor, want_residual: bool) -> tuple[Tensor, Tensor | None]:
        shape = value.shape
        if not self._maps_rows(shape):
            body, residual = self.quantizer.encode(value.reshape(-1), want_residual)
            return body, None if residual is None else residual.view(shape)
        matrix = value.reshape(matrix_shape(shape))
        live = live_rows(matrix)
        note = encode_row_map(live, matrix.shape[0])
        flat = (matrix if live is None else matrix[live]).reshape(-1)
        body, residual = self.quantizer.encode(flat, want_residual)
        if residual is not None and live is not None:
            spread = torch.zeros(matrix.shape, dtype=torch.float32, device=value.device)
            spread[live] = residual.view(-1, matrix.shape[1])
            residual = spread
        return torch.cat([body, note]), None if residual is None else residual.view(shape)

    def _maps_rows(self, shape: Sequence[int]) -> bool:
        return not self.quantizer.keeps_zero and has_row_map(shape)


def build_quantizer(settings: QuantizerSettings, compiled: bool = False) -> Quantizer:
    """The quantizer that `settings` describe; `compiled` as in `Blockwise`."""
    if isinstance(settings, Fp16Codec):
        return Fp16(settings.block)
    if isinstance(settings, BlockwiseCodec):
        return Blockwise(_LEVELS[settings.type], settings.block, compiled)
    if isinstance(settings, Bf16Codec):
        return Bf16()
    assert isinstance(settings, NoneCodec)
    return Fp32()


def build_codec(settings: CodecSettings, seed: int = 0, compiled: bool = False) -> Codec:
    """The codec that `settings` describe.

    Args:
        settings: Any codec of `dsx.settings.codec_block`.
        seed: The run's seed; `lowrank` derives its first subspaces from it.
        compiled: Use `torch.compile` where it makes a difference (large tensors of the integer
            codecs). The bytes are the same.
    """
    if isinstance(settings, TopKCodec | LowRankCodec):
        raise NotImplementedError(settings.type)
    return Dense(settings, build_quantizer(settings, compiled))


def finite(value: Tensor) -> bool:
    """Whether `value` holds neither NaN nor infinity (one pass, no temporary of its size)."""
    if value.numel() == 0:
        return True
    low, high = torch.aminmax(value.detach())
    return math.isfinite(float(low)) and math.isfinite(float(high))
