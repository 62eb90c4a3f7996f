from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.data.order import SampleOrder


@given(count=st.integers(1, 700), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_block_exactly_once(count: int, seed: int, epoch: int) -> None:
    order = SampleOrder(count, seed)
    visited = [order[position] for position in range(epoch * count, (epoch + 1) * count)]
    assert sorted(visited) == list(range(count))


def test_epochs_and_seeds_give_different_orders() -> None:
    first = SampleOrder(1000, seed=0)
    epochs = [tuple(first[epoch * 1000 + at] for at in range(1000)) for epoch in range(3)]
    other = tuple(SampleOrder(1000, seed=1)[at] for at in range(1000))
    assert len({*epochs, other}) == 4


def test_the_order_is_a_function_of_seed_and_position_alone() -> None:
    forwards = SampleOrder(101, seed=5)
    in_order = [forwards[position] for position in range(500)]
    jumping = SampleOrder(101, seed=5)
    assert [jumping[position] for position in reversed(range(500))] == in_order[::-1]


def test_the_order_is_the_one_that_earlier_runs_used() -> None:
    order = SampleOrder(1000, seed=7)
    first = [order[position] for position in range(10)]
    assert first == [885, 610, 311, 953, 703, 893, 648, 900, 769, 274]


def test_neighbours_of_the_corpus_are_scattered_evenly() -> None:
    count = 4096
    order = SampleOrder(count, seed=3)
    values = [order[position] for position in range(count)]
    # A random permutation has one fixed point and one pair of neighbours kept on average.
    assert sum(value == at for at, value in enumerate(values)) < 8
    assert sum(b - a == 1 for a, b in pairwise(values)) < 8
    means = [sum(values[start : start + 512]) / 512 for start in range(0, count, 512)]
    # Standard deviation of such a mean is about 52.
    assert all(abs(mean - (count - 1) / 2) < 5 * 52 for mean in means)


def test_a_huge_corpus_is_ordered_without_an_index() -> None:
    count = 10**15
    order = SampleOrder(count, seed=0)
    values = [order[position] for position in range(1000)]
    assert len(set(values)) == 1000
    assert max(values) < count


def test_positions_before_the_start_and_empty_orders_are_refused() -> None:
    with pytest.raises(IndexError, match="-1"):
        SampleOrder(10, seed=0)[-1]
    with pytest.raises(ValueError, match="not 0"):
        SampleOrder(0, seed=0)
