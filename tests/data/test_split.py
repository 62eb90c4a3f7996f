import numpy as np
import pytest

from dsx.data.split import document_hash, document_hashes, heldout_mask
from dsx.errors import DataError

TEXTS = [f"text {number}" for number in range(200)]


def held_out(texts: list[str], fraction: float) -> set[str]:
    mask = heldout_mask(document_hashes(texts, len(texts)), fraction)
    return {text for text, held in zip(texts, mask, strict=True) if held}


def test_the_share_of_documents_is_exact_and_at_least_one() -> None:
    assert len(held_out(TEXTS, 0.1)) == 20
    assert len(held_out(TEXTS, 0.013)) == 3
    assert len(held_out(TEXTS, 0.0001)) == 1


def test_the_split_depends_on_texts_and_not_on_their_order() -> None:
    assert held_out(TEXTS, 0.1) == held_out(TEXTS[::-1], 0.1)


def test_a_larger_share_keeps_what_a_smaller_one_held_out() -> None:
    assert held_out(TEXTS, 0.05) < held_out(TEXTS, 0.1)


def test_equal_documents_stay_on_one_side() -> None:
    smallest = min(TEXTS, key=document_hash)
    texts = [*TEXTS, smallest, smallest]
    mask = heldout_mask(document_hashes(texts, len(texts)), 1 / len(texts))
    assert mask.sum() == 3
    assert mask[[texts.index(smallest), -1, -2]].all()


def test_the_hash_is_the_same_everywhere() -> None:
    # As `b2sum -l 64` prints it, first byte last.
    assert document_hash("naïve\n") == 0x0B8FA9E640128FF2


def test_a_split_with_an_empty_side_is_refused() -> None:
    with pytest.raises(DataError, match=r"1 document\(s\)"):
        heldout_mask(np.array([1], dtype=np.uint64), 0.1)
    with pytest.raises(DataError, match="leaves none to train on"):
        heldout_mask(np.array([7, 7, 7], dtype=np.uint64), 0.1)
