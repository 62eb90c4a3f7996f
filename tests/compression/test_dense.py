"""Entry-by-entry codecs: what they give back, byte for byte and value for value."""

import math

import pytest
import torch

from dsx.compression.build import build_codec
from dsx.compression.codec import finite
from dsx.settings.codec_block import (
    Int2Codec,
    Int4Codec,
    Int8Codec,
    NoneCodec,
    SignCodec,
)
from tests.compression.codecs import QUANTIZERS, name_of

INTEGER = [Int8Codec(), Int4Codec(), Int2Codec(), Int2Codec(scale="mean"), SignCodec()]
STEPS = {"int8": 127, "int4": 7, "int2": 3}


def is_of_mean(codec) -> bool:
    return isinstance(codec, Int2Codec) and codec.scale == "mean"


def roundtrip(codec_settings, value):
    codec = build_codec(codec_settings)
    return codec.decode(codec.encode("w", value), value.shape)


def largest_error(codec, block: torch.Tensor) -> float:
    """The bound on an entry's error, from the block's largest magnitude."""
    kind, largest = codec.type, float(block.abs().max())
    if is_of_mean(codec):
        return largest
    if kind == "none":
        return 0.0
    if kind == "sign":
        return largest
    if kind == "bf16":
        return largest * 2.0**-8
    if kind == "fp16":
        return largest * 2.0**-11
    # Half a step; the scale is rounded upwards to 8 bits.
    return largest / STEPS[kind] * (1 + 2.0**-7) * (1.0001 if kind == "int2" else 0.50001)


@pytest.mark.parametrize("codec", QUANTIZERS, ids=name_of)
def test_every_length_decodes_to_within_the_codecs_error_bound(codec):
    generator = torch.Generator().manual_seed(1)
    for length in range(131):
        value = torch.randn(length, generator=generator)
        decoded = roundtrip(codec, value)
        assert decoded.shape == value.shape
        assert decoded.dtype == torch.float32
        for start in range(0, length, 128):
            block = value[start : start + 128]
            error = (block - decoded[start : start + 128]).abs().max()
            assert float(error) <= largest_error(codec, block)


def test_none_gives_every_bit_back_even_of_odd_values():
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, math.inf, -math.inf, math.nan])
    assert roundtrip(NoneCodec(), odd).view(torch.int32).equal(odd.view(torch.int32))


@pytest.mark.parametrize("codec", QUANTIZERS, ids=name_of)
def test_a_constant_block_comes_back_to_the_precision_of_its_scale(codec):
    for constant in (1.0, -3e-7, 1e30):
        decoded = roundtrip(codec, torch.full((256,), constant))
        level = 2 / 3 if is_of_mean(codec) else 1.0
        assert torch.allclose(decoded, torch.full((256,), constant * level), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("codec", QUANTIZERS, ids=name_of)
def test_subnormal_and_huge_blocks_stay_finite_and_within_the_block(codec):
    largest = torch.finfo(torch.float32).max
    for magnitude in (1e-45, 1e-42, 1e-39, 1.2e-38, 1e-36, 1e38, largest):
        value = torch.linspace(-1, 1, 200) * magnitude
        decoded = roundtrip(codec, value)
        assert bool(torch.isfinite(decoded).all())
        outermost = 2 if is_of_mean(codec) else 1
        beyond = float(decoded.abs().max()) - outermost * float(value.abs().max())
        assert beyond <= magnitude * 0.01 + 1e-40


@pytest.mark.parametrize("codec", INTEGER, ids=name_of)
def test_an_outlier_hurts_its_own_block_only(codec):
    value = torch.full((384,), 1.0)
    value[130] = 1e6
    decoded = roundtrip(codec, value)
    alone = roundtrip(codec, torch.ones(128))
    assert decoded[:128].equal(alone)
    assert decoded[256:].equal(alone)
    assert decoded[130] > 7000


@pytest.mark.parametrize("codec", [Int8Codec(block=32), Int4Codec(block=32), Int2Codec(block=32)])
def test_values_on_the_levels_come_back_exactly(codec):
    steps = STEPS[codec.type]
    levels = torch.arange(-steps, steps + 1, 2 if codec.type == "int2" else 1) * 0.25
    value = levels.repeat(40)[: 32 * (len(levels) * 40 // 32)].view(-1, 32)
    value = value[value.abs().amax(1) == steps * 0.25].reshape(-1)
    assert value.numel() > 0
    assert roundtrip(codec, value).equal(value)


def test_sign_sends_the_mean_magnitude_of_the_block():
    value = torch.tensor([1.0, -3.0, 2.0, -2.0] * 32)
    assert roundtrip(SignCodec(), value).equal(value.sign() * 2)


def test_int2_of_the_mean_halves_the_error_on_normal_and_heavy_tailed_values():
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(64, 128, generator=generator)
    heavy = normal * torch.randn(64, 128, generator=generator).abs()
    for value, share in ((normal, 0.66), (heavy, 0.5)):
        of_mean = (roundtrip(Int2Codec(scale="mean"), value) - value).norm()
        assert of_mean < share * (roundtrip(Int2Codec(), value) - value).norm()


@pytest.mark.parametrize(
    ("codec", "bits"),
    [("int8", 8.125), ("int4", 4.125), ("int2", 2.125), ("sign", 1.125), ("fp16", 16.125)],
)
def test_bytes_are_what_the_width_and_the_scales_add_up_to(codec, bits):
    built = build_codec(next(c for c in QUANTIZERS if c.type == codec))
    assert built.encode("w", torch.randn(128 * 64)).numel() * 8 == bits * 128 * 64


@pytest.mark.parametrize("codec", INTEGER, ids=name_of)
def test_zero_rows_stay_zero_and_cost_no_codes(codec):
    value = torch.randn(64, 40)
    value[::2] = 0
    decoded = roundtrip(codec, value)
    assert decoded[::2].equal(torch.zeros(32, 40))
    if codec.type in ("int2", "sign"):
        dense = build_codec(codec)
        assert dense.encode("w", value).numel() < dense.encode("w", torch.randn(64, 40)).numel()


def test_finite_sees_nan_and_infinity():
    value = torch.randn(1000)
    assert finite(value)
    assert finite(torch.empty(0))
    for bad in (math.nan, math.inf, -math.inf):
        value[977] = bad
        assert not finite(value)
        assert not finite(value.bfloat16())
