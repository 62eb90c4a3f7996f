"""What every codec promises, whatever it does inside."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.compression.build import build_codec
from dsx.compression.describe import describe, understand
from dsx.compression.feedback import ErrorFeedback
from dsx.compression.measure import relative_error
from dsx.errors import ExchangeError
from tests.compression.codecs import ALL, LOWRANK, TOPK, name_of

SMALL_SHAPES = [(), (0,), (1, 1), (1, 9), (2, 3), (3, 8), (3, 7), (1, 2, 8), (0, 8), (8, 0)]


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@given(
    shape=st.lists(st.integers(1, 50), max_size=3),
    exponent=st.integers(-44, 38),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
    zero_rows=st.booleans(),
)
@settings(max_examples=40)
def test_the_residual_is_exactly_what_decoding_leaves(
    codec, shape, exponent, seed, dtype, transposed, zero_rows
):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    value = (value.clamp(-3, 3) * 10.0**exponent).to(dtype)
    if zero_rows and len(shape) > 1:
        value[:: 1 + seed % 3] = 0
    if transposed and len(shape) > 1:
        value = value.transpose(0, -1)
    built = build_codec(codec, seed=1)
    body, residual = built.encode_with_residual("w", value)
    decoded = built.decode(body, value.shape)
    assert body.dtype == torch.uint8
    assert body.equal(built.encode("w", value))
    assert body.numel() <= built.most_bytes(value.shape)
    assert decoded.dtype == torch.float32
    assert decoded.shape == value.shape
    if bool(torch.isfinite(value).all()) and exponent < 38:
        assert bool(torch.isfinite(decoded).all())
    assert torch.equal(residual.nan_to_num(9.0), (value.float() - decoded).nan_to_num(9.0))


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@pytest.mark.parametrize("shape", [(), (300,), (48, 40), (5, 9, 40)])
def test_residual_and_tensor_may_be_written_into_given_memory(codec, shape):
    built = build_codec(codec)
    value = torch.randn(shape)
    if len(shape) > 1:
        value[3] = 0
    body, residual = built.encode_with_residual("w", value)
    places = [value.clone(), torch.stack([value, value], dim=-1)[..., 1]]
    for place in places:
        same_body, overwritten = built.encode_with_residual("w", place, overwrite=True)
        assert overwritten is place
        assert same_body.equal(body)
        assert place.equal(residual)
    out = torch.full(shape, 7.0)
    assert built.decode(body, shape, out) is out
    assert out.equal(built.decode(body, shape))
    with pytest.raises(ValueError, match="only fp32"):
        built.encode_with_residual("w", value.bfloat16(), overwrite=True)


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_no_tensor_becomes_larger_than_raw_fp32(codec):
    built = build_codec(codec)
    shapes = [*SMALL_SHAPES, (16, 16), (40, 30), (40, 3, 30), *[(n,) for n in range(131)]]
    for shape in shapes:
        body = built.encode("w", torch.randn(shape))
        assert body.numel() <= built.most_bytes(shape) <= 4 * math.prod(shape)
        assert built.decode(body, shape).shape == torch.Size(shape)


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_zeros_decode_to_zeros(codec):
    for shape in [(1,), (130,), (3, 64), (), (64, 48)]:
        built = build_codec(codec)
        assert built.decode(built.encode("w", torch.zeros(shape)), shape).equal(torch.zeros(shape))


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_an_update_sent_every_round_arrives_whole_in_the_long_run(codec):
    built, feedback = build_codec(codec), ErrorFeedback(decay=1.0)
    delta = 1e-4 * torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    arrived = torch.zeros_like(delta)
    for _ in range(100):
        body, residual = built.encode_with_residual("w", feedback.add("w", delta))
        arrived += built.decode(body, delta.shape)
        feedback.stage("w", residual)
        feedback.commit()
        built.commit("w")
    assert float((arrived / 100 - delta).norm() / delta.norm()) < 0.35
    assert float(feedback.state_dict()["w"].norm()) < 35 * float(delta.norm())


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_rows_without_a_gradient_do_not_drift_over_100_rounds(codec, decay):
    built, feedback = build_codec(codec), ErrorFeedback(decay)
    generator = torch.Generator().manual_seed(5)
    dead = torch.arange(50) % 3 == 0
    arrived = torch.zeros(50, 40)
    for _ in range(100):
        delta = torch.randn(50, 40, generator=generator)
        delta[dead] = 0
        body, residual = built.encode_with_residual("w", feedback.add("w", delta))
        arrived += built.decode(body, delta.shape)
        feedback.stage("w", residual)
        feedback.commit()
        built.commit("w")
    assert arrived[dead].equal(torch.zeros(int(dead.sum()), 40))
    assert feedback.state_dict()["w"][dead].equal(torch.zeros(int(dead.sum()), 40))
    assert float(arrived[~dead].norm()) > 0


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_a_codec_is_known_again_from_its_description(codec):
    known = understand(describe(codec))
    assert known.type == codec.type
    value = torch.randn(40, 48)
    body = build_codec(codec).encode("w", value)
    assert (
        build_codec(known)
        .decode(body, value.shape)
        .equal(build_codec(codec).decode(body, value.shape))
    )
    for length in range(len(describe(codec))):
        with pytest.raises(ExchangeError):
            understand(describe(codec)[:length])


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_a_body_of_the_wrong_length_is_refused(codec):
    built = build_codec(codec)
    body = built.encode("w", torch.randn(40, 48))
    for wrong in (body[:-1], torch.cat([body, body[-1:]]), body[:0]):
        with pytest.raises(ExchangeError):
            built.decode(wrong, (40, 48))


@pytest.mark.parametrize("codec", [*TOPK, *LOWRANK], ids=name_of)
def test_vectors_and_small_tensors_are_sent_entry_by_entry(codec):
    inner = getattr(codec, "values", None) or codec.factors
    for shape in [(), (2,), (1, 2)] + ([(4096,), (3, 5)] if codec.type == "lowrank" else []):
        value = torch.randn(shape)
        assert build_codec(codec).encode("w", value).equal(build_codec(inner).encode("w", value))


def test_relative_error_is_that_of_the_decoded_tensor():
    value = torch.tensor([3.0, 4.0, 0.0])
    assert relative_error(value, torch.tensor([3.0, 4.0, 1.0])) == 0.2
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
