"""The plain codec: every entry of a tensor, through a quantizer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.compression.codec import Stateless, to_overwrite, written_back
from dsx.compression.quantizers import Quantizer
from dsx.compression.rows import (
    encode_row_map,
    has_row_map,
    live_rows,
    matrix_shape,
    row_map_bytes,
    split_row_map,
)
from dsx.settings.codec_block import QuantizerSettings


class Dense(Stateless):
    """Every entry, through a quantizer; all-zero rows are left out where that matters."""

    def __init__(self, settings: QuantizerSettings, quantizer: Quantizer) -> None:
        self._settings = settings
        self.quantizer = quantizer

    @property
    def settings(self) -> QuantizerSettings:
        return self._settings

    def encode(self, name: str, value: Tensor) -> Tensor:
        return self._encode(value.reshape(-1), value.shape, overwrite=False)

    def encode_with_residual(
        self, name: str, value: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        target, flat = to_overwrite(value, overwrite)
        body = self._encode(flat, value.shape, overwrite=True)
        return body, written_back(flat, target)

    def decode(self, body: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(tuple(shape))
        flat = out.view(-1)
        rows, length = matrix_shape(shape)
        live = None
        if self._maps_rows(shape):
            body, live = split_row_map(body, rows)
        if live is None:
            self.quantizer.decode(body, rows * length, flat)
        else:
            values = self.quantizer.decode(body, live.numel() * length)
            flat.zero_().view(rows, length)[live] = values.view(-1, length)
        return out

    def most_bytes(self, shape: Sequence[int]) -> int:
        note = row_map_bytes(matrix_shape(shape)[0]) if self._maps_rows(shape) else 0
        return self.quantizer.body_bytes(math.prod(shape)) + note

    def _encode(self, flat: Tensor, shape: Sequence[int], overwrite: bool) -> Tensor:
        if not self._maps_rows(shape):
            return self.quantizer.encode(flat, overwrite)
        matrix = flat.view(matrix_shape(shape))
        live = live_rows(matrix)
        if live is None:
            body = self.quantizer.encode(flat, overwrite)
        else:
            entries = matrix[live].float()
            body = self.quantizer.encode(entries.view(-1), overwrite)
            if overwrite:
                matrix[live] = entries
        return torch.cat([body, encode_row_map(live, matrix.shape[0])])

    def _maps_rows(self, shape: Sequence[int]) -> bool:
        return not self.quantizer.keeps_zero and has_row_map(shape)
