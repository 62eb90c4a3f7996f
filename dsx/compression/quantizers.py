"""Quantizers: codecs of flat runs of entries, without regard to shape or name."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from dsx.compression.compiling import decoder, encoder
from dsx.compression.levels import Levels, decode_blocks, encode_blocks, inverse_scale, scale_of
from dsx.errors import ExchangeError

_EAGER_CHUNK = {"cpu": 1 << 17, "elsewhere": 1 << 22}
"""Entries that one eager call works on: on a CPU what stays in its caches, on a GPU what bounds
the memory for intermediate values. A compiled call has none, and takes all."""


class Quantizer(ABC):
    """Encodes a 1-D tensor, entry by entry or block by block."""

    keeps_zero: bool = True
    """Whether zeros decode to zeros, wherever they stand."""

    @abstractmethod
    def body_bytes(self, count: int) -> int:
        """Bytes that `count` entries are encoded into: at most 4 a piece."""

    @abstractmethod
    def encode(self, flat: Tensor, overwrite: bool = False) -> Tensor:
        """Encode `flat` (1-D, fp32 or bf16, finite, any device).

        Args:
            flat: The entries.
            overwrite: Write `flat - decoded`, exactly what decoding and subtracting would give,
                over `flat`, which then must be fp32.

        Returns:
            The body: uint8, 1-D, on the CPU. It may share memory with `flat` if that is kept.
        """

    @abstractmethod
    def _decode(self, body: Tensor, out: Tensor) -> None: ...

    def decode(self, body: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """The `count` entries (fp32, 1-D, CPU) of `body`, in `out` if that is given.

        Raises:
            ExchangeError: `body` is not of the length that `count` entries have.
        """
        if body.numel() != self.body_bytes(count):
            raise ExchangeError(
                f"an encoded tensor of {count} entries must have {self.body_bytes(count)} bytes, "
                f"but {body.numel()} came: the message is damaged or from another version of dsx"
            )
        if out is None:
            out = torch.empty(count, dtype=torch.float32)
        self._decode(body, out)
        return out


class Fp32(Quantizer):
    """The entries themselves."""

    def body_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, flat: Tensor, overwrite: bool = False) -> Tensor:
        body = _bytes(flat.float())
        if overwrite:
            body = body.clone()
            flat.zero_()
        return body

    def _decode(self, body: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(body)


class Bf16(Quantizer):
    """Rounded to bfloat16; what would round to infinity becomes the largest bfloat16."""

    _limit = torch.finfo(torch.bfloat16).max

    def body_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Tensor, overwrite: bool = False) -> Tensor:
        rounded = torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device)
        for entries in _pieces(flat.numel(), 1, flat.device):
            rounded[entries] = flat[entries].clamp(-self._limit, self._limit)
            if overwrite:
                flat[entries] -= rounded[entries]
        return _bytes(rounded)

    def _decode(self, body: Tensor, out: Tensor) -> None:
        out.copy_(_aligned(body, torch.bfloat16))


class Fp16(Quantizer):
    """Half precision of the entry over its block's largest magnitude (a bfloat16 scale).

    Plain half precision would lose updates below 6e-8 and those above 65504.
    Body: the entries, the scales.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def body_bytes(self, count: int) -> int:
        return 2 * count + 2 * -(-count // self.block)

    def encode(self, flat: Tensor, overwrite: bool = False) -> Tensor:
        count, device = flat.numel(), flat.device
        halves = torch.empty(count, dtype=torch.float16, device=device)
        scales = torch.empty(-(-count // self.block), dtype=torch.bfloat16, device=device)
        for entries in _pieces(count, self.block, device):
            blocks = self._blocks(flat[entries].float())
            scale = scale_of(blocks, 1.0)
            rounded = (blocks * inverse_scale(scale)).half()
            halves[entries] = rounded.view(-1)
            scales[self._of_blocks(entries)] = scale.view(-1)
            if overwrite:
                flat[entries] -= (rounded.float() * scale).view(-1)
        return torch.cat([_bytes(halves), _bytes(scales)])

    def _decode(self, body: Tensor, out: Tensor) -> None:
        count = out.numel()
        scales = _aligned(body[2 * count :], torch.bfloat16).float().view(-1, 1)
        halves = _aligned(body[: 2 * count], torch.float16)
        for entries in _pieces(count, self.block, body.device):
            blocks = self._blocks(halves[entries]).float()
            torch.mul(blocks, scales[self._of_blocks(entries)], out=self._blocks(out[entries]))

    def _blocks(self, entries: Tensor) -> Tensor:
        """Full blocks (blocks, block), or the last, shorter one (1, its length)."""
        return entries.view(-1, min(self.block, max(1, entries.numel())))

    def _of_blocks(self, entries: slice) -> slice:
        return slice(entries.start // self.block, -(-entries.stop // self.block))


class Blockwise(Quantizer):
    """Blocks of `block` entries with a scale each; the last block may be shorter.

    Body: the codes of the full blocks, those of the last, the bfloat16 scales of all.

    Args:
        levels: Which levels.
        block: Entries of a block, a power of two, 8 or more.
        compiled: Run the block functions through `torch.compile`: the same bytes, several times
            faster, after compilations of many seconds. Meant for large tensors.
    """

    def __init__(self, levels: Levels, block: int, compiled: bool = False) -> None:
        self.levels = levels
        self.block = block
        self.compiled = compiled
        self.keeps_zero = levels.keeps_zero

    def body_bytes(self, count: int) -> int:
        blocks, tail = divmod(count, self.block)
        return blocks * self._width + self._tail_width(tail) + 2 * (blocks + (tail > 0))

    @property
    def _width(self) -> int:
        """Bytes of a full block's codes."""
        return self.block * self.levels.bits // 8

    def _tail_width(self, tail: int) -> int:
        return -(-tail // self.levels.per_byte)

    def encode(self, flat: Tensor, overwrite: bool = False) -> Tensor:
        device = flat.device
        blocks, tail = divmod(flat.numel(), self.block)
        body = torch.empty(self.body_bytes(flat.numel()), dtype=torch.uint8, device=device)
        scale_bits = torch.empty(blocks + (tail > 0), 1, dtype=torch.int32, device=device)
        codes = body[: blocks * self._width].view(-1, self._width)
        run = encoder(self.levels, self.block, overwrite, self.compiled, device.type)
        for start, stop in self._chunks(blocks, device):
            run(
                flat[start * self.block : stop * self.block].float().view(-1, self.block),
                codes[start:stop],
                scale_bits[start:stop],
            )
        if tail:
            end = blocks * self._width
            last_codes = body[end : end + self._tail_width(tail)].unsqueeze(0)
            rest = self._encode_tail(flat[-tail:].float(), last_codes, scale_bits[-1:])
            if overwrite:
                flat[-tail:] = rest
        scales = (scale_bits >> 16).to(torch.int16).view(-1)
        body[body.numel() - 2 * scales.numel() :].copy_(scales.view(torch.uint8))
        return body.cpu()

    def _encode_tail(self, last: Tensor, codes: Tensor, scale_bits: Tensor) -> Tensor:
        """Encode a shorter block; returns its residual."""
        padding = codes.shape[1] * self.levels.per_byte - last.numel()
        padded = torch.nn.functional.pad(last, (0, padding)).unsqueeze(0)
        encode_blocks(self.levels, last.numel(), padded, codes, scale_bits, overwrite=True)
        return padded[0, : last.numel()]

    def _decode(self, body: Tensor, out: Tensor) -> None:
        blocks, tail = divmod(out.numel(), self.block)
        end = blocks * self._width
        codes = body[:end].view(-1, self._width)
        scale = _aligned(body[end + self._tail_width(tail) :], torch.bfloat16).float().view(-1, 1)
        run = decoder(self.levels, self.compiled)
        for start, stop in self._chunks(blocks, body.device):
            entries = out[start * self.block : stop * self.block].view(-1, self.block)
            run(codes[start:stop], scale[start:stop], entries.split(self._width, dim=1))
        if tail:
            last_codes = body[end : end + self._tail_width(tail)].unsqueeze(0)
            last = torch.empty(1, last_codes.numel() * self.levels.per_byte)
            parts = last.split(last_codes.numel(), dim=1)
            decode_blocks(self.levels, last_codes, scale[-1:], parts)
            out[-tail:].copy_(last[0, :tail])

    def _chunks(self, blocks: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """(first block, last block + 1) of what the block functions are to do at a time."""
        if self.compiled and blocks:
            yield 0, blocks
            return
        for entries in _pieces(blocks * self.block, self.block, device):
            yield entries.start // self.block, entries.stop // self.block


def _pieces(count: int, block: int, device: torch.device) -> Iterator[slice]:
    """Runs of whole blocks that fit an eager chunk, and the last, shorter block by itself."""
    chunk = _EAGER_CHUNK["cpu" if device.type == "cpu" else "elsewhere"]
    step = max(1, chunk // block) * block
    whole = count - count % block
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole))
    if whole < count:
        yield slice(whole, count)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).cpu()


def _aligned(body: Tensor, dtype: torch.dtype) -> Tensor:
    """`body` seen as `dtype`, copied first where its place in memory does not allow that."""
    if body.storage_offset() % dtype.itemsize or not body.is_contiguous():
        body = body.clone()
    return body.view(dtype)
