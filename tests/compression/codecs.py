"""Every kind of codec, for tests that must hold for all of them."""

import torch

from dsx.settings.codec_block import (
    Bf16Codec,
    Fp16Codec,
    Int2Codec,
    Int4Codec,
    Int8Codec,
    LowRankCodec,
    NoneCodec,
    SignCodec,
    TopKCodec,
)

QUANTIZERS = [
    NoneCodec(),
    Fp16Codec(),
    Bf16Codec(),
    Int8Codec(),
    Int4Codec(),
    Int2Codec(),
    Int2Codec(scale="mean"),
    SignCodec(),
]
TOPK = [
    TopKCodec(fraction=0.03, values=Int2Codec()),
    TopKCodec(fraction=0.1, values=SignCodec()),
    TopKCodec(fraction=0.25, values=NoneCodec()),
]
LOWRANK = [
    LowRankCodec(rank=4, factors=NoneCodec()),
    LowRankCodec(rank=4, factors=Int4Codec()),
    LowRankCodec(rank=3, factors=Int2Codec(scale="mean")),
    LowRankCodec(rank=2, factors=SignCodec()),
]
ALL = QUANTIZERS + TOPK + LOWRANK


def name_of(codec) -> str:
    """A short name for a test's id."""
    inner = getattr(codec, "values", None) or getattr(codec, "factors", None)
    scale = "-mean" if getattr(codec, "scale", "absmax") == "mean" else ""
    return codec.type + scale + (f"-{name_of(inner)}" if inner else "")


def decaying(rows: int, columns: int, power: float = 1.0, seed: int = 0) -> torch.Tensor:
    """A matrix whose i-th singular value is about i^-power."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, rank, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, rank, generator=generator)).Q
    return (left * torch.arange(1, rank + 1).float() ** -power) @ right.T
