"""Entry-by-entry codecs: what they give back, byte for byte and value for value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.compression.codec import build_codec, finite
from dsx.errors import ExchangeError
from dsx.settings.codec_block import (
    Bf16Codec,
    Fp16Codec,
    Int2Codec,
    Int4Codec,
    Int8Codec,
    NoneCodec,
    SignCodec,
)

PLAIN = [NoneCodec(), Fp16Codec(), Bf16Codec()]
INTEGER = [Int8Codec(), Int4Codec(), Int2Codec(), SignCodec()]
STEPS = {"int8": 127, "int4": 7, "int2": 3}
ALL = PLAIN + INTEGER


def by_type(codec):
    return codec.type


def roundtrip(codec_settings, value):
    codec = build_codec(codec_settings)
    return codec.decode(codec.encode("w", value), value.shape)


def largest_error(kind: str, block: torch.Tensor) -> float:
    """The bound on an entry's error, from the block's largest magnitude."""
    largest = float(block.abs().max())
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


@pytest.mark.parametrize("codec", ALL, ids=by_type)
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
            assert float(error) <= largest_error(codec.type, block)


@pytest.mark.parametrize("codec", ALL, ids=by_type)
def test_no_tensor_becomes_larger_than_raw_fp32(codec):
    built = build_codec(codec)
    shapes = [(), (0,), (1, 1), (1, 9), (2, 3), (3, 8), (2, 8), (1, 2, 8)]
    for shape in [*shapes, *[(n,) for n in range(1, 131)]]:
        value = torch.randn(shape)
        assert built.encode("w", value).numel() <= max(4 * math.prod(shape), 0)
        assert built.decode(built.encode("w", value), shape).shape == torch.Size(shape)


@pytest.mark.parametrize("codec", ALL, ids=by_type)
@given(
    shape=st.lists(st.integers(1, 40), max_size=3),
    exponent=st.integers(-44, 38),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
    zero_rows=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_residual_is_exactly_what_decoding_leaves(
    codec, shape, exponent, seed, dtype, transposed, zero_rows
):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    value = (value.clamp(-3, 3) * 10.0**exponent).to(dtype)
    if zero_rows and len(shape) > 1:
        value[:: 1 + seed % 3] = 0
    if transposed:
        value = value.transpose(0, -1) if len(shape) > 1 else value
    built = build_codec(codec)
    body, residual = built.encode_with_residual("w", value)
    decoded = built.decode(body, value.shape)
    assert body.equal(built.encode("w", value))
    assert body.numel() <= built.most_bytes(value.shape)
    assert bool(torch.isfinite(decoded).all()) == finite(value)
    assert residual.equal(value.float() - decoded)


def test_none_gives_every_bit_back_even_of_odd_values():
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, math.inf, -math.inf, math.nan])
    assert roundtrip(NoneCodec(), odd).view(torch.int32).equal(odd.view(torch.int32))


@pytest.mark.parametrize("codec", ALL, ids=by_type)
def test_zeros_decode_to_zeros(codec):
    for shape in [(1,), (130,), (3, 64), ()]:
        assert roundtrip(codec, torch.zeros(shape)).equal(torch.zeros(shape))


@pytest.mark.parametrize("codec", ALL, ids=by_type)
def test_a_constant_block_comes_back_to_the_precision_of_its_scale(codec):
    for constant in (1.0, -3e-7, 1e30):
        decoded = roundtrip(codec, torch.full((256,), constant))
        assert torch.allclose(decoded, torch.full((256,), constant), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("codec", ALL, ids=by_type)
def test_subnormal_and_huge_blocks_stay_finite_and_within_the_block(codec):
    largest = torch.finfo(torch.float32).max
    for magnitude in (1e-45, 1e-42, 1e-39, 1.2e-38, 1e-36, 1e38, largest):
        value = torch.linspace(-1, 1, 200) * magnitude
        decoded = roundtrip(codec, value)
        assert bool(torch.isfinite(decoded).all())
        beyond = float(decoded.abs().max()) - float(value.abs().max())
        assert beyond <= magnitude * 0.01 + 1e-40


@pytest.mark.parametrize("codec", INTEGER, ids=by_type)
def test_an_outlier_hurts_its_own_block_only(codec):
    value = torch.full((384,), 1.0)
    value[130] = 1e6
    decoded = roundtrip(codec, value)
    assert torch.allclose(decoded[:128], value[:128], rtol=2.0**-7)
    assert torch.allclose(decoded[256:], value[256:], rtol=2.0**-7)
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


@pytest.mark.parametrize(
    ("codec", "bits"),
    [("int8", 8.125), ("int4", 4.125), ("int2", 2.125), ("sign", 1.125), ("fp16", 16.125)],
)
def test_bytes_are_what_the_width_and_the_scales_add_up_to(codec, bits):
    built = build_codec({c.type: c for c in ALL}[codec])
    assert built.encode("w", torch.randn(128 * 64)).numel() * 8 == bits * 128 * 64


@pytest.mark.parametrize("codec", INTEGER, ids=by_type)
def test_zero_rows_stay_zero_and_cost_no_codes(codec):
    value = torch.randn(64, 40)
    value[::2] = 0
    decoded = roundtrip(codec, value)
    assert decoded[::2].equal(torch.zeros(32, 40))
    if codec.type in ("int2", "sign"):
        dense = build_codec(codec)
        assert dense.encode("w", value).numel() < dense.encode("w", torch.randn(64, 40)).numel()


@pytest.mark.parametrize("codec", ALL, ids=by_type)
def test_a_body_of_the_wrong_length_is_refused(codec):
    built = build_codec(codec)
    body = built.encode("w", torch.randn(20, 20))
    for wrong in (body[:-1], torch.cat([body, body[:1]]), body[:0]):
        with pytest.raises(ExchangeError):
            built.decode(wrong, (20, 20))


def test_finite_sees_nan_and_infinity():
    value = torch.randn(1000)
    assert finite(value)
    assert finite(torch.empty(0))
    for bad in (math.nan, math.inf, -math.inf):
        value[977] = bad
        assert not finite(value)
        assert not finite(value.bfloat16())
