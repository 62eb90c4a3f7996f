"""Owners' shares are equal, however large one tensor is, and hold everything once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.outer.pieces import Piece, deal

LLAMA = {
    "embed": torch.Size([4096, 192]),
    "norm": torch.Size([192]),
    "up": torch.Size([512, 192]),
    "scalar": torch.Size([]),
    "experts": torch.Size([8, 64, 32]),
    "head": torch.Size([4096, 192]),
}
SHAPES = st.dictionaries(
    st.text("abcdef", min_size=1), st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
)


def elements(pieces: list[Piece], shapes: dict[str, torch.Size]) -> int:
    return sum(piece.shape(shapes[piece.name]).numel() for piece in pieces)


@given(shapes=SHAPES, owners=st.integers(1, 12), cut=st.booleans())
def test_every_row_of_every_tensor_has_one_owner(
    shapes: dict[str, torch.Size], owners: int, cut: bool
) -> None:
    dealt = deal(shapes, list(shapes), owners, lambda name: cut)
    assert len(dealt) == owners
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    found: dict[str, list[torch.Tensor]] = {}
    for own in dealt:
        for piece in own:
            value = piece.of(values[piece.name])
            assert value.shape == piece.shape(shapes[piece.name])
            found.setdefault(piece.name, []).append(value)
    assert list(found) == list(shapes)
    for name, parts in found.items():
        assert torch.equal(parts[0] if len(parts) == 1 else torch.cat(parts), values[name])


@pytest.mark.parametrize("owners", [2, 8, 64])
def test_shares_differ_by_a_row_at_most(owners: int) -> None:
    dealt = deal(LLAMA, list(LLAMA), owners, lambda name: True)
    loads = [elements(own, LLAMA) for own in dealt]
    largest_row = 64 * 32
    assert max(loads) - min(loads) <= 2 * largest_row


def test_what_can_not_be_cut_stays_whole() -> None:
    dealt = deal(LLAMA, list(LLAMA), 8, lambda name: name != "embed")
    labels = [piece.label for own in dealt for piece in own]
    assert "embed" in labels
    assert len([label for label in labels if label.startswith("head[")]) > 1
