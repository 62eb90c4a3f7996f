"""Whole tensors to owner replicas, and the pieces in which they move."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dsx.cluster.ownership import Span, assign_owners, buckets

SIZES = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.integers(1, 1000), max_size=12)


@given(SIZES, st.integers(1, 5))
def test_every_tensor_has_one_owner_and_no_owner_has_too_much(
    sizes: dict[str, int], replicas: int
) -> None:
    owners = assign_owners(sizes, replicas)
    assert list(owners) == list(sizes)
    loads = [sum(sizes[n] for n, o in owners.items() if o == r) for r in range(replicas)]
    assert sum(loads) == sum(sizes.values())
    # Whoever is fullest was emptiest when it got its last and smallest tensor.
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_owners_do_not_depend_on_the_order_of_the_tensors() -> None:
    sizes = {"a": 5, "b": 5, "c": 9, "d": 1}
    assert assign_owners(dict(reversed(sizes.items())), 2) == assign_owners(sizes, 2)
    assert assign_owners(sizes, 2) == {"c": 0, "a": 1, "b": 1, "d": 0}


@given(SIZES, st.integers(1, 300))
def test_buckets_cover_every_element_once_and_in_order(sizes: dict[str, int], limit: int) -> None:
    made = list(buckets(sizes, limit))
    assert all(0 < sum(map(len, bucket)) <= limit for bucket in made)
    spans = [span for bucket in made for span in bucket]
    assert list(dict.fromkeys(span.name for span in spans)) == list(sizes)
    for name, size in sizes.items():
        own = [(span.start, span.stop) for span in spans if span.name == name]
        assert own[0][0] == 0
        assert own[-1][1] == size
        assert all(left[1] == right[0] for left, right in itertools.pairwise(own))


def test_a_tensor_that_fits_into_a_bucket_is_not_cut() -> None:
    assert list(buckets({"a": 6, "b": 6, "c": 4}, 10)) == [
        [Span("a", 0, 6)],
        [Span("b", 0, 6), Span("c", 0, 4)],
    ]


@given(*[st.integers(0, 20)] * 4)
def test_a_cut_span_is_the_overlap(start: int, length: int, low: int, more: int) -> None:
    cut = Span("a", start, start + length).cut(low, low + more)
    assert set(range(cut.start, cut.stop)) == set(range(start, start + length)) & set(
        range(low, low + more)
    )
