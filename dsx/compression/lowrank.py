"""Two factors of low rank instead of a matrix."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.compression.codec import to_overwrite, written_back
from dsx.compression.dense import Dense
from dsx.compression.exact import exact_product, subtract_product
from dsx.compression.orthonormal import fit, orthonormal_columns
from dsx.compression.quantizers import Quantizer
from dsx.compression.rows import (
    encode_row_map,
    has_row_map,
    live_rows,
    matrix_shape,
    row_map_bytes,
    split_row_map,
)
from dsx.errors import CheckpointError
from dsx.settings.codec_block import LowRankCodec

_EXTREME = 2.0**60
"""Matrices with larger (or, inverted, only smaller) entries are scaled first: squares must fit."""


class LowRank:
    """One step of subspace iteration a round (PowerSGD, arXiv 1905.13727), own factors.

    `P = orth(V Q')` with Q' the last round's Q, encoded; `Q = argmin |V - P Q^T|` with P as others
    will see it (`V^T P` when nothing was lost), encoded: whatever quantizing takes from P, Q makes
    up for as far as it can. The product is exact (`dsx.compression.exact`), so that all clusters
    decode the same bits. Factors are quantized column by column, as their columns' sizes differ.

    Body: the columns of P, those of Q, a note on zero rows. Tensors of less than two dimensions,
    and matrices m x n with (m + n) r >= m n / 2, are sent entry by entry by the factors' quantizer.

    Args:
        settings: rank and factors.
        factors: The quantizer that `settings.factors` describe.
        seed: The run's; with the tensor's name it gives the first Q'.
    """

    def __init__(self, settings: LowRankCodec, factors: Quantizer, seed: int) -> None:
        self._settings = settings
        self._factors = factors
        self._seed = seed
        self._dense = Dense(settings.factors, factors)
        self._subspaces: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    @property
    def settings(self) -> LowRankCodec:
        return self._settings

    def set_rank(self, rank: int) -> None:
        """Use another rank from the next encoding on; what was learnt is kept as far as it fits."""
        self._settings = LowRankCodec(rank=rank, factors=self._settings.factors)

    def encode(self, name: str, value: Tensor) -> Tensor:
        if not self._is_low_rank(value.shape):
            return self._dense.encode(name, value)
        return self._encode(name, value)[0]

    def encode_with_residual(
        self, name: str, value: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self._is_low_rank(value.shape):
            return self._dense.encode_with_residual(name, value, overwrite)
        body, live, p, q = self._encode(name, value)
        target, flat = to_overwrite(value, overwrite)
        matrix = flat.view(-1, value.shape[-1])
        if live is None:
            subtract_product(matrix, p, q)
        else:
            rest = matrix[live]
            subtract_product(rest, p, q)
            matrix[live] = rest
        return body, written_back(flat, target)

    def decode(self, body: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        if not self._is_low_rank(shape):
            return self._dense.decode(body, shape, out)
        rows, length = matrix_shape(shape)
        live = None
        if has_row_map(shape):
            body, live = split_row_map(body, rows)
        left = rows if live is None else live.numel()
        rank = min(self._settings.rank, left)
        start = self._factors.body_bytes(rank * left)
        p = self._factors.decode(body[:start], rank * left).view(rank, left)
        q = self._factors.decode(body[start:], rank * length).view(rank, length)
        out = torch.empty(tuple(shape)) if out is None else out
        matrix = out.view(rows, length)
        if live is None:
            exact_product(p, q, out=matrix)
        else:
            matrix.zero_()[live] = exact_product(p, q)
        return out

    def most_bytes(self, shape: Sequence[int]) -> int:
        if not self._is_low_rank(shape):
            return self._dense.most_bytes(shape)
        rows, length = matrix_shape(shape)
        rank = self._settings.rank
        factors = self._factors.body_bytes(rank * rows) + self._factors.body_bytes(rank * length)
        return factors + (row_map_bytes(rows) if has_row_map(shape) else 0)

    def commit(self, name: str) -> None:
        if name in self._staged:
            self._subspaces[name] = self._staged.pop(name)

    def discard(self, name: str) -> None:
        self._staged.pop(name, None)

    def state_dict(self) -> dict[str, Tensor]:
        """The last Q of every tensor that is sent by low rank, (entries per row, rank)."""
        return dict(self._subspaces)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._subspaces = {name: q.to("cpu", torch.float32) for name, q in state.items()}
        self._staged = {}

    def _is_low_rank(self, shape: Sequence[int]) -> bool:
        return is_low_rank(shape, self._settings.rank)

    def _encode(self, name: str, value: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(body, live rows, P^T, Q^T), the factors as decoding gives them."""
        matrix = value.reshape(matrix_shape(value.shape)).float()
        rows = matrix.shape[0]
        live, note = None, torch.empty(0, dtype=torch.uint8)
        if has_row_map(value.shape):
            live = live_rows(matrix)
            note = encode_row_map(live, rows)
            matrix = matrix if live is None else matrix[live]
        scale = _scale(matrix)
        if scale != 1.0:
            matrix = matrix * scale
        rank = min(self._settings.rank, matrix.shape[0])
        start = self._subspace(name, matrix.shape[1])[:, :rank].to(matrix.device)
        p, p_body = self._quantize(orthonormal_columns(matrix @ start))
        exact_q = fit(p.T, matrix)
        q, q_body = self._quantize(exact_q / scale)
        self._stage(name, exact_q)
        return torch.cat([p_body, q_body, note]), live, p, q

    def _quantize(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """(decoded, body) of a factor's transpose: whole columns, one after the other."""
        body = self._factors.encode(factor.T.reshape(-1))
        decoded = self._factors.decode(body, factor.numel()).to(factor.device)
        return decoded.view(factor.shape[1], factor.shape[0]), body

    def _stage(self, name: str, q: Tensor) -> None:
        largest = q.abs().max() if q.numel() else q.new_zeros(())
        if float(largest) > 0:
            self._staged[name] = (q / largest).cpu()

    def _subspace(self, name: str, length: int) -> Tensor:
        """Q' (length, rank): what the last round left, filled up with pseudo-random columns."""
        known = self._subspaces.get(name)
        if known is not None and known.shape[0] != length:
            raise CheckpointError(
                f"the low-rank state of {name} is for rows of {known.shape[0]} entries, but they "
                f"have {length}; it belongs to another model"
            )
        rank = self._settings.rank
        if known is not None and known.shape[1] > rank:
            strongest = torch.linalg.vector_norm(known, dim=0).topk(rank).indices
            return known[:, strongest.sort().values]
        missing = rank if known is None else rank - known.shape[1]
        if not missing:
            assert known is not None
            return known
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        fresh = torch.randn(length, rank, generator=generator)[:, rank - missing :]
        return fresh if known is None else torch.cat([known, fresh], dim=1)


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether two factors of `rank` are sent of such a tensor: they are small enough then."""
    rows, length = matrix_shape(shape)
    return len(shape) > 1 and (rows + length) * rank < rows * length / 2


def _scale(matrix: Tensor) -> float:
    """A power of two that brings a matrix of extreme entries back to where squares fit."""
    if matrix.numel() == 0:
        return 1.0
    largest = float(matrix.abs().amax())
    if largest == 0.0 or 1 / _EXTREME < largest < _EXTREME:
        return 1.0
    return 2.0 ** -max(-126, min(126, math.frexp(largest)[1]))
