"""Digests of named tensors."""

import torch

from dsx.outer.digest import join_digests, tensor_digest


def test_a_digest_does_not_depend_on_how_tensors_are_spread_over_ranks() -> None:
    tensors = {f"w{index}": torch.randn(5, index) for index in range(6)}
    whole = tensor_digest(tensors)
    parts = [tensor_digest({name: tensors[name]}) for name in reversed(tensors)]
    summed = [float(sum(part[place] for part in parts)) for place in range(len(whole))]
    assert join_digests(summed) == join_digests([float(value) for value in whole])


def test_one_flipped_bit_or_a_swapped_name_changes_the_digest() -> None:
    one, other = torch.zeros(4), torch.ones(4)
    digest = tensor_digest({"a": one, "b": other})
    assert tensor_digest({"a": other, "b": one}) != digest
    assert tensor_digest({"a": -one, "b": other}) != digest
