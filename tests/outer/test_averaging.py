"""Buckets and the weighted mean."""

import pytest
import torch

from dsx.errors import ExchangeError
from dsx.outer.averaging import buckets, pack, unpack

SHAPES = {"a": torch.Size([3, 2]), "scalar": torch.Size([]), "b": torch.Size([7])}


def test_packed_tensors_come_back_bit_for_bit() -> None:
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["a"] = torch.randn(2, 3).T
    names = list(SHAPES)
    back = unpack(pack(tensors, names), SHAPES, names, "x")
    assert all(torch.equal(back[name], tensors[name]) for name in names)


def test_a_payload_of_another_length_is_refused_by_the_senders_name() -> None:
    with pytest.raises(ExchangeError, match="cluster far sent 12 bytes"):
        unpack(torch.zeros(12, dtype=torch.uint8), SHAPES, ["a"], "far")


def test_buckets_hold_every_name_once_and_stay_below_their_limit() -> None:
    million = torch.Size([1024, 1024])
    shapes = {f"w{index}": million for index in range(40)} | {"huge": torch.Size([32, 2**20])}
    cut = list(buckets(shapes))
    assert [name for bucket in cut for name in bucket] == list(shapes)
    assert [len(bucket) for bucket in cut] == [16, 16, 8, 1]
