"""Blockwise quantization to 2^b levels, as pure tensor functions.

One source for the eager path and for `torch.compile`, on CPU and GPU, which must give the same
bytes. Everything here is therefore exact or rounds in one defined way, whatever gets fused:

* Scales are bfloat16, made by integer arithmetic (a compiler may drop a cast pair). bfloat16 has
  fp32's range, so neither tiny nor huge blocks need special care.
* A code times a scale has at most 8 + 8 significant bits: exact in fp32, so that contracting
  `v - code * scale` into one operation changes nothing.
* The only division is in fp64, once per block: fp32 division is approximate on some GPUs.
* The order of the one summation (`sign`) is written out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_LARGEST = 3.38e38
"""Magnitudes above this are scaled as if they were this large, so that no scale rounds to inf."""
_SMALLEST_SCALE_BITS = 1 << 23
"""The bit pattern of 2^-126. Blocks that would need a smaller (subnormal) scale are sent as zeros,
because 1 / scale must be finite. Error feedback keeps what they held."""


@dataclass(frozen=True)
class Levels:
    """The levels of a quantizer, in multiples of a block's scale."""

    name: str
    bits: int
    steps: int
    """The largest level."""
    keeps_zero: bool
    """Whether an entry that is zero in a block that is not decodes to zero."""
    scale_of: Literal["absmax", "mean"]
    """What the scale is derived from: the largest magnitude of the block or their mean."""
    unit: float
    """The scale over that."""
    to_codes: Callable[[Tensor], Tensor]
    """fp32 multiples of the scale to int32 codes 0 .. 2^bits - 1. With `absmax` they lie in
    [-steps, steps]; nothing is said of them where the scale is 0."""
    to_multiples: Callable[[Tensor], Tensor]
    """fp32 codes to fp32 multiples of the scale."""

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


INT8 = Levels(
    "int8",
    bits=8,
    steps=127,
    keeps_zero=True,
    scale_of="absmax",
    unit=1 / 127,
    to_codes=lambda x: (torch.round(x) + 128.0).to(torch.int32),
    to_multiples=lambda code: code - 128.0,
)
INT4 = Levels(
    "int4",
    bits=4,
    steps=7,
    keeps_zero=True,
    scale_of="absmax",
    unit=1 / 7,
    to_codes=lambda x: (torch.round(x) + 8.0).to(torch.int32),
    to_multiples=lambda code: code - 8.0,
)
INT2 = Levels(
    "int2",
    bits=2,
    steps=3,
    keeps_zero=False,
    scale_of="absmax",
    unit=1 / 3,
    to_codes=lambda x: (torch.floor(x * 0.5) + 2.0).to(torch.int32),
    to_multiples=lambda code: code * 2.0 - 3.0,
)
INT2_MEAN = Levels(
    "int2 of the mean",
    bits=2,
    steps=3,
    keeps_zero=False,
    scale_of="mean",
    # Near the least squared error of normal (0.62), Laplace (0.76) and heavier-tailed blocks.
    unit=2 / 3,
    to_codes=lambda x: torch.clamp(torch.floor(x * 0.5) + 2.0, 0.0, 3.0).to(torch.int32),
    to_multiples=lambda code: code * 2.0 - 3.0,
)
SIGN = Levels(
    "sign",
    bits=1,
    steps=1,
    keeps_zero=False,
    scale_of="mean",
    unit=1.0,
    to_codes=lambda x: (x.view(torch.int32) >> 31) + 1,
    to_multiples=lambda code: code * 2.0 - 1.0,
)


def encode_blocks(
    levels: Levels,
    count: int,
    x: Tensor,
    codes: Tensor,
    scale_bits: Tensor,
    overwrite: bool = False,
) -> None:
    """Quantize blocks.

    Args:
        levels: Which levels.
        count: Entries of a block that are real; the others are zeros at its end (only ever in a
            tensor's last block).
        x: fp32 (blocks, block), block a multiple of `levels.per_byte`.
        codes: uint8 (blocks, block * bits / 8), written. Byte j of a block holds the entries
            j, j + width, j + 2 width, ..., lowest bits first, width being the bytes of a block:
            neighbours in memory stay neighbours in vector registers.
        scale_bits: int32 (blocks, 1), written: the fp32 bit patterns of the bfloat16 scales.
        overwrite: Write `x - decoded` over x.
    """
    if levels.scale_of == "absmax":
        bits = _absmax_scale_bits(x, levels.unit)
    else:
        bits = _mean_scale_bits(x, count, levels)
    scale = bits.view(torch.float32)
    code = levels.to_codes(x * inverse_scale(scale))
    width = codes.shape[1]
    packed = code[:, :width]
    for part in range(1, levels.per_byte):
        piece = code[:, part * width : (part + 1) * width]
        packed = packed | (piece << (part * levels.bits))
    codes.copy_(packed)
    scale_bits.copy_(bits)
    if overwrite:
        x.copy_(x - levels.to_multiples(code.float()) * scale)


def decode_blocks(levels: Levels, codes: Tensor, scale: Tensor, parts: Sequence[Tensor]) -> None:
    """The inverse.

    Args:
        levels: Which levels.
        codes: uint8 (blocks, width), as `encode_blocks` wrote them.
        scale: fp32 (blocks, 1).
        parts: fp32 (blocks, width) each, `levels.per_byte` of them, written: the entries of a
            block, cut into pieces as long as its codes. (One output could not be compiled well.)
    """
    mask = (1 << levels.bits) - 1
    wide = codes.to(torch.int32)
    for part, out in enumerate(parts):
        code = wide if levels.bits == 8 else (wide >> (part * levels.bits)) & mask
        out.copy_(levels.to_multiples(code.float()) * scale)


def _absmax_scale_bits(x: Tensor, unit: float) -> Tensor:
    """int32 (blocks, 1): fp32 bit patterns of absmax * unit, rounded upwards to bfloat16.

    Upwards: no multiple of the scale then exceeds 1 / unit, and none has to be clamped.
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp(max=_LARGEST)
    bits = (largest * unit).view(torch.int32)
    return _flush((bits + 0xFFFF) & -0x10000)


def _mean_scale_bits(x: Tensor, count: int, levels: Levels) -> Tensor:
    """int32 (blocks, 1): fp32 bit patterns of mean(|x|) * unit, rounded to bfloat16."""
    mean = _sum_in_halves(x.abs() * (1.0 / count)) * levels.unit
    bits = mean.clamp(max=_LARGEST / levels.steps).view(torch.int32)
    return _flush((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)


def scale_of(x: Tensor, unit: float) -> Tensor:
    """fp32 (blocks, 1): absmax * unit, rounded upwards to bfloat16."""
    return _absmax_scale_bits(x, unit).view(torch.float32)


def inverse_scale(scale: Tensor) -> Tensor:
    """1 / scale, correctly rounded on every device, and 0 for 0."""
    return torch.where(scale > 0, (1.0 / scale.double()).float(), 0.0)


def _flush(bits: Tensor) -> Tensor:
    return torch.where(bits < _SMALLEST_SCALE_BITS, 0, bits)


def _sum_in_halves(x: Tensor) -> Tensor:
    """Row sums of x (rows, any width), (rows, 1), in one fixed order of additions."""
    width = x.shape[1]
    padded = 1 << (width - 1).bit_length()
    if padded != width:
        x = torch.nn.functional.pad(x, (0, padded - width))
    while padded > 1:
        padded //= 2
        x = x[:, :padded] + x[:, padded:]
    return x
