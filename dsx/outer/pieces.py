"""Which owner averages what in the scatter pattern: equal, consecutive shares of the tensors.

A tensor that lies across the border between two shares is cut there, between two rows. So no
cluster has more to send, to receive or to decode than another, however large one tensor is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A whole tensor, or some of its rows."""

    name: str
    rows: tuple[int, int] | None = None
    """First row, and the one after the last; None: the whole tensor."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name if self.rows is None else "{}[{}:{}]".format(self.name, *self.rows)

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """A view of this part of the tensor."""
        return value if self.rows is None else value[slice(*self.rows)]

    def shape(self, whole: torch.Size) -> torch.Size:
        """Of this part of a tensor of shape `whole`."""
        if self.rows is None:
            return whole
        first, end = self.rows
        return torch.Size([end - first, *whole[1:]])


def deal(
    shapes: Mapping[str, torch.Size],
    names: Sequence[str],
    owners: int,
    divisible: Callable[[str], bool],
) -> list[list[Piece]]:
    """Deal tensors out, by elements; each owner's pieces in order.

    Args:
        divisible: whether a tensor may be cut.
    """
    total = max(1, sum(shapes[name].numel() for name in names))
    dealt: list[list[Piece]] = [[] for _ in range(owners)]
    before = 0
    for name in names:
        shape = shapes[name]
        rows = shape[0] if len(shape) > 1 and shape.numel() and divisible(name) else 1
        row = shape.numel() // rows
        first = 0
        while first < rows:
            # A row belongs to the share in which its middle lies.
            owner = min(owners - 1, (2 * (before + first * row) + row) * owners // (2 * total))
            end = rows
            if rows > 1 and owner < owners - 1:
                border = 2 * total * (owner + 1) - owners * (2 * before + row)
                end = min(rows, max(first + 1, -(-border // (2 * owners * row))))
            piece = Piece(name) if (first, end) == (0, rows) else Piece(name, (first, end))
            dealt[owner].append(piece)
            first = end
        before += shape.numel()
    return dealt
