"""The plain codec: every entry of a tensor, through a quantizer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.compression.codec import Stateless
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
        return self._encode(value, want_residual=False)[0]

    def encode_with_residual(self, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        body, residual = self._encode(value, want_residual=True)
        assert residual is not None
        return body, residual

    def decode(self, body: Tensor, shape: Sequence[int]) -> Tensor:
        if not self._maps_rows(shape):
            return self.quantizer.decode(body, math.prod(shape)).view(tuple(shape))
        rows, length = matrix_shape(shape)
        body, live = split_row_map(body, rows)
        if live is None:
            return self.quantizer.decode(body, rows * length).view(tuple(shape))
        values = self.quantizer.decode(body, live.numel() * length)
        out = torch.zeros(rows, length)
        out[live] = values.view(-1, length)
        return out.view(tuple(shape))

    def most_bytes(self, shape: Sequence[int]) -> int:
        note = row_map_bytes(matrix_shape(shape)[0]) if self._maps_rows(shape) else 0
        return self.quantizer.body_bytes(math.prod(shape)) + note

    def _encode(self, value: Tensor, want_residual: bool) -> tuple[Tensor, Tensor | None]:
        shape = value.shape
        if not self._maps_rows(shape):
            body, residual = self.quantizer.encode(value.reshape(-1), want_residual)
            return body, None if residual is None else residual.view(shape)
        matrix = value.reshape(matrix_shape(shape))
        live = live_rows(matrix)
        note = encode_row_map(live, matrix.shape[0])
        flat = (matrix if live is None else matrix[live]).reshape(-1)
        body, residual = self.quantizer.encode(flat, want_residual)
        if residual is not None and live is not None:
            spread = torch.zeros(matrix.shape, dtype=torch.float32, device=value.device)
            spread[live] = residual.view(-1, matrix.shape[1])
            residual = spread
        return torch.cat([body, note]), None if residual is None else residual.view(shape)

    def _maps_rows(self, shape: Sequence[int]) -> bool:
        return not self.quantizer.keeps_zero and has_row_map(shape)
