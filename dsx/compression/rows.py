"""Leaving out rows that are zero, for codecs whose levels do not include it.

An embedding row whose token never occurs has no update. A quantizer without a zero level would
send plus or minus something for it in every round, and with a decaying error feedback the row
would slowly drift. Such rows are named in a bitmap instead, and cost no more than that bit.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsx.errors import ExchangeError

_SHORTEST = 8
"""Entries of the shortest rows that are looked at: a bit per shorter row would cost too much."""
_ALL, _SOME = 0, 1


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, entries per row) of a tensor with its leading dimensions joined; 1-D is one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return math.prod(shape[:-1]), shape[-1]


def has_row_map(shape: Sequence[int]) -> bool:
    """Whether tensors of this shape are sent with a note on which rows are zero."""
    rows, length = matrix_shape(shape)
    return len(shape) >= 2 and rows > 1 and length >= _SHORTEST


def row_map_bytes(rows: int) -> int:
    """Length of the longest note on so many rows."""
    return 1 + -(-rows // 8)


def live_rows(matrix: Tensor) -> Tensor | None:
    """Places (int64, on the device of `matrix`) of the rows that are not all zero; None if all."""
    live = matrix[:, 0] != 0
    if bool(live.all()):
        return None
    doubtful = torch.nonzero(~live).squeeze(1)
    live[doubtful] = (matrix[doubtful] != 0).any(dim=1)
    return None if bool(live.all()) else torch.nonzero(live).squeeze(1)


def encode_row_map(live: Tensor | None, rows: int) -> Tensor:
    """The note, uint8 1-D on the CPU: one byte, preceded by a bitmap unless all rows live."""
    if live is None:
        return torch.tensor([_ALL], dtype=torch.uint8)
    bits = np.zeros(rows, dtype=np.uint8)
    bits[live.cpu().numpy()] = 1
    return torch.from_numpy(np.append(np.packbits(bits), np.uint8(_SOME)))


def split_row_map(body: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """`body` without the note at its end, and the places of the live rows (None: all).

    Raises:
        ExchangeError: there is no such note.
    """
    kind = int(body[-1]) if body.numel() else -1
    if kind == _ALL:
        return body[:-1], None
    size = -(-rows // 8)
    if kind != _SOME or body.numel() < size + 1:
        raise ExchangeError(
            f"a message's note on {rows} rows is damaged (kind {kind}, {body.numel()} bytes left)"
        )
    bits = np.unpackbits(body[-size - 1 : -1].numpy(), count=rows)
    return body[: -size - 1], torch.from_numpy(np.flatnonzero(bits))
