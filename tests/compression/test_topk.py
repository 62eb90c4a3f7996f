"""Sparse updates: which entries are sent, and what their places cost."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dsx.compression.build import build_codec
from dsx.compression.describe import describe, understand
from dsx.compression.elias_fano import decode_indices, encode_indices, encoded_bytes
from dsx.errors import ExchangeError
from dsx.settings.codec_block import NoneCodec, TopKCodec


@pytest.mark.parametrize("entries", [100, 1000, 700_000])
def test_the_largest_entries_arrive_and_no_others(entries):
    value = torch.randn(entries, generator=torch.Generator().manual_seed(entries))
    codec = build_codec(TopKCodec(fraction=0.05, values=NoneCodec()))
    decoded = codec.decode(codec.encode("w", value), value.shape)
    kept = value.abs().topk(entries // 20).indices
    expected = torch.zeros(entries)
    expected[kept] = value[kept]
    assert decoded.equal(expected)


def test_a_sample_that_misleads_does_not_change_what_is_sent():
    value = torch.rand(1 << 20) + 1
    value[:: (1 << 20) // (1 << 16)] = 1e-3  # What the threshold is guessed from.
    value[5:200] = 100.0
    peaks = torch.zeros(1 << 20)
    peaks[:: (1 << 20) // (1 << 16)] = 50.0
    codec = build_codec(TopKCodec(fraction=0.01, values=NoneCodec()))
    for v in (value, peaks):
        decoded = codec.decode(codec.encode("w", v), v.shape)
        kept = round(0.01 * v.numel())
        assert float(decoded.abs().sum()) == pytest.approx(float(v.topk(kept).values.sum()))


def test_zeros_are_not_sent():
    value = torch.zeros(10_000)
    value[77] = 3.0
    codec = build_codec(TopKCodec(fraction=0.1, values=NoneCodec()))
    body = codec.encode("w", value)
    assert body.numel() == 8 + encoded_bytes(10_000, 1) + 4
    assert codec.decode(body, value.shape).equal(value)


def test_places_cost_about_seven_bits_at_three_per_cent():
    value = torch.randn(1 << 18)
    body = build_codec(TopKCodec(fraction=0.03)).encode("w", value)
    kept = round(0.03 * value.numel())
    assert body.numel() * 8 / kept < 7.1 + 2.13


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 4096, 100_003, 1 << 40])
def test_indices_come_back(limit):
    generator = np.random.default_rng(limit)
    for count in (0, 1, min(3, limit), min(500, limit)):
        indices = np.unique(generator.integers(0, limit, size=count))
        data = encode_indices(indices, limit)
        if count == 0 or len(indices) * 2**20 > limit:
            assert len(data) == encoded_bytes(limit, len(indices))
            np.testing.assert_array_equal(decode_indices(data, limit, len(indices)), indices)


def test_damaged_indices_are_refused():
    indices = np.arange(0, 1000, 10)
    data = encode_indices(indices, 1000)
    refused = 0
    for bit in range(8 * len(data)):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            decoded = decode_indices(damaged, 1000, 100)
        except ExchangeError:
            refused += 1
        else:
            assert decoded.min() >= 0
            assert decoded.max() < 1000
            assert np.all(np.diff(decoded) > 0)
    assert refused > 200


def test_more_entries_than_the_fraction_allows_are_refused():
    codec = build_codec(TopKCodec(fraction=0.1, values=NoneCodec()))
    body = codec.encode("w", torch.randn(1000))
    body[:8] = torch.tensor([1 << 60]).view(torch.uint8)
    with pytest.raises(ExchangeError, match="at most 100"):
        codec.decode(body, (1000,))


def test_the_smallest_fraction_is_understood_by_the_reader():
    codec = TopKCodec(fraction=2.0**-20)
    assert understand(describe(codec)) == codec
    with pytest.raises(ValidationError):
        TopKCodec(fraction=2.0**-21)
