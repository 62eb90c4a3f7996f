"""Quantizers: codecs of flat runs of entries, without regard to shape or name."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from dsx.compression.compiling import decoder, encoder
from dsx.compression.levels import (
    Levels,
    absmax_scale_bits,
    decode_blocks,
    encode_blocks,
    inverse_scale,
)
from dsx.errors import ExchangeError

_EAGER_CHUNK = {"cpu": 1 << 15, "elsewhere": 1 << 22}
"""Entries that one eager call works on: on a CPU what stays in its caches, on a GPU what bounds
the memory for intermediate values."""
_COMPILED_CHUNK = {"cpu": 1 << 17, "elsewhere": 1 << 24}
"""Entries of one compiled call, always the same; what is left of a tensor is done eagerly."""


class Quantizer(ABC):
    """Encodes a 1-D fp32 tensor, entry by entry or block by block."""

    keeps_zero: ClassVar[bool] = True
    """Whether zeros decode to zeros, wherever they stand."""

    @abstractmethod
    def body_bytes(self, count: int) -> int:
        """Bytes that `count` entries are encoded into: at most 4 a piece."""

    @abstractmethod
    def encode(self, flat: Tensor, want_residual: bool = False) -> tuple[Tensor, Tensor | None]:
        """Encode `flat` (1-D, fp32 or bf16, finite, any device).

        Returns the body (uint8, 1-D, on the CPU) and, if wanted, `flat - decoded` (fp32, on the
        device of `flat`), equal to what decoding and subtracting would give. The body may share
        memory with `flat`.
        """

    @abstractmethod
    def _decode(self, body: Tensor, count: int) -> Tensor: ...

    def decode(self, body: Tensor, count: int) -> Tensor:
        """The `count` entries (fp32, 1-D, CPU) of `body`; ExchangeError if its length is wrong."""
        if body.numel() != self.body_bytes(count):
            raise ExchangeError(
                f"an encoded tensor of {count} entries must have {self.body_bytes(count)} bytes, "
                f"but {body.numel()} came: the message is damaged or from another version of dsx"
            )
        return self._decode(body, count)


class Fp32(Quantizer):
    """The entries themselves."""

    def body_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, flat: Tensor, want_residual: bool = False) -> tuple[Tensor, Tensor | None]:
        values = flat.float()
        return _bytes(values), torch.zeros_like(values) if want_residual else None

    def _decode(self, body: Tensor, count: int) -> Tensor:
        return _aligned(body, torch.float32).clone()


class Bf16(Quantizer):
    """Rounded to bfloat16; what would round to infinity becomes the largest bfloat16."""

    _limit = torch.finfo(torch.bfloat16).max

    def body_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Tensor, want_residual: bool = False) -> tuple[Tensor, Tensor | None]:
        rounded = flat.clamp(-self._limit, self._limit).to(torch.bfloat16)
        return _bytes(rounded), flat.float() - rounded.float() if want_residual else None

    def _decode(self, body: Tensor, count: int) -> Tensor:
        return _aligned(body, torch.bfloat16).float()


class Blockwise(Quantizer):
    """Blocks of `block` entries with a scale each; the last block may be shorter.

    Body: the bfloat16 scales of all blocks, the codes of the full blocks, those of the last.

    Args:
        levels: Which levels.
        block: Entries of a block, a power of two, 8 or more.
        compiled: Run the block functions through `torch.compile`: the same bytes, several times
            faster, after a compilation of many seconds. Meant for large tensors; what is left of
            a tensor after its last full chunk is always done eagerly.
    """

    def __init__(self, levels: Levels, block: int, compiled: bool = False) -> None:
        self.levels = levels
        self.block = block
        self.compiled = compiled
        self.keeps_zero = levels.keeps_zero  # type: ignore[misc]

    def body_bytes(self, count: int) -> int:
        blocks = -(-count // self.block)
        tail = count % self.block
        codes = (count - tail) * self.levels.bits // 8 + self._tail_width(tail)
        return 2 * blocks + codes

    def _tail_width(self, tail: int) -> int:
        return -(-tail // self.levels.per_byte)

    def encode(self, flat: Tensor, want_residual: bool = False) -> tuple[Tensor, Tensor | None]:
        count, device = flat.numel(), flat.device
        blocks, tail = divmod(count, self.block)
        width = self.block * self.levels.bits // 8
        body = torch.empty(self.body_bytes(count), dtype=torch.uint8, device=device)
        scales = torch.empty(blocks + (tail > 0), dtype=torch.int16, device=device)
        residual = torch.empty(count, dtype=torch.float32, device=device) if want_residual else None
        first = scales.numel() * 2
        for start, stop, compiled in self._chunks(blocks, device):
            entries = slice(start * self.block, stop * self.block)
            encoder(self.levels, self.block, compiled, device.type)(
                flat[entries].float().view(-1, self.block),
                body[first + start * width : first + stop * width].view(-1, width),
                scales[start:stop],
                None if residual is None else residual[entries].view(-1, self.block),
            )
        if tail:
            self._encode_tail(flat, tail, body, scales, residual)
        body[:first].copy_(scales.view(torch.uint8))
        return body.cpu(), residual

    def _encode_tail(
        self, flat: Tensor, tail: int, body: Tensor, scales: Tensor, residual: Tensor | None
    ) -> None:
        width = self._tail_width(tail)
        padding = width * self.levels.per_byte - tail
        last = torch.nn.functional.pad(flat[-tail:].float(), (0, padding)).unsqueeze(0)
        rest = torch.empty_like(last) if residual is not None else None
        encode_blocks(self.levels, tail, last, body[-width:].unsqueeze(0), scales[-1:], rest)
        if residual is not None and rest is not None:
            residual[-tail:].copy_(rest[0, :tail])

    def _decode(self, body: Tensor, count: int) -> Tensor:
        blocks, tail = divmod(count, self.block)
        width = self.block * self.levels.bits // 8
        out = torch.empty(count, dtype=torch.float32)
        first = 2 * (blocks + (tail > 0))
        scales = _aligned(body[:first], torch.int16)
        for start, stop, compiled in self._chunks(blocks, body.device):
            decoder(self.levels, compiled)(
                body[first + start * width : first + stop * width].view(-1, width),
                scales[start:stop],
                out[start * self.block : stop * self.block].view(-1, self.block),
            )
        if tail:
            width = self._tail_width(tail)
            last = torch.empty(1, width * self.levels.per_byte)
            decode_blocks(self.levels, body[-width:].unsqueeze(0), scales[-1:], last)
            out[-tail:].copy_(last[0, :tail])
        return out

    def _chunks(self, blocks: int, device: torch.device) -> Iterator[tuple[int, int, bool]]:
        """(first block, last block + 1, whether to run compiled), in order."""
        kind = "cpu" if device.type == "cpu" else "elsewhere"
        start = 0
        if self.compiled:
            step = max(1, _COMPILED_CHUNK[kind] // self.block)
            while start + step <= blocks:
                yield start, start + step, True
                start += step
        step = max(1, _EAGER_CHUNK[kind] // self.block)
        while start < blocks:
            yield start, min(start + step, blocks), False
            start += step


class Fp16(Quantizer):
    """Half precision of the entry over its block's largest magnitude (a bfloat16 scale).

    Plain half precision would lose updates below 6e-8 and those above 65504.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def body_bytes(self, count: int) -> int:
        return 2 * count + 2 * -(-count // self.block)

    def encode(self, flat: Tensor, want_residual: bool = False) -> tuple[Tensor, Tensor | None]:
        values = flat.float()
        scales, inverse = self._scales(values)
        halves = (values * self._spread(inverse, values.numel())).half()
        body = torch.cat([_bytes(scales), _bytes(halves)])
        if not want_residual:
            return body, None
        return body, values - halves.float() * self._spread(scales.float(), values.numel())

    def _decode(self, body: Tensor, count: int) -> Tensor:
        first = body.numel() - 2 * count
        scales = _aligned(body[:first], torch.bfloat16).float()
        return _aligned(body[first:], torch.float16).float() * self._spread(scales, count)

    def _scales(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """bfloat16 scales of the blocks, not below their largest magnitudes, and 1 / scale."""
        padding = -values.numel() % self.block
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, self.block)
        bits = absmax_scale_bits(blocks, 1.0)
        scale = bits.view(torch.float32)
        return scale.to(torch.bfloat16).view(-1), inverse_scale(scale).view(-1)

    def _spread(self, per_block: Tensor, count: int) -> Tensor:
        return per_block.repeat_interleave(self.block)[:count]


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).cpu()


def _aligned(body: Tensor, dtype: torch.dtype) -> Tensor:
    """`body` seen as `dtype`, copied first where its place in memory does not allow that."""
    if body.storage_offset() % dtype.itemsize or not body.is_contiguous():
        body = body.clone()
    return body.view(dtype)
