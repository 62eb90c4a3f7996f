"""How much of a matrix its leading singular directions hold."""

import hashlib

import torch
from torch import Tensor

from dsx.compression.orthonormal import orthonormal_columns

_EXACT_SIDE = 512
"""Up to this shorter side all singular values are computed: that takes milliseconds."""
_OVERSAMPLE = 8
"""Directions more than asked for: the last ones of a sketch are the inexact ones."""


def leading_energies(matrix: Tensor, most: int, name: str = "") -> tuple[Tensor, float]:
    """The largest squared singular values, and the sum of all of them.

    Larger matrices are sketched with one step of subspace iteration (Halko et al., arXiv
    0909.4061): exact up to rounding where the rank is at most `most`, as of an average of few
    low-rank updates, and else a little too small. It costs four products with the matrix, like
    encoding it twice.

    Args:
        matrix: fp32, (m, n), finite.
        most: How many are wanted.
        name: Seeds the sketch.

    Returns:
        (min(most, m, n),) float64, descending, and the squared Frobenius norm.
    """
    side = min(matrix.shape)
    most = min(most, side)
    largest = float(matrix.abs().amax()) if matrix.numel() else 0.0
    if largest == 0.0:
        return torch.zeros(most, dtype=torch.float64), 0.0
    matrix = matrix / largest  # Squares then neither over- nor underflow.
    total = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
    if side > _EXACT_SIDE and most + _OVERSAMPLE < side:
        matrix = _sketch(matrix, most + _OVERSAMPLE, name)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    values = torch.linalg.eigvalsh((matrix @ matrix.T).double())
    energies = values.flip(0).clamp(min=0)[:most].cpu()
    return energies * largest**2, total * largest**2


def effective_rank(energies: Tensor, total: float, eps: float) -> int:
    """The smallest r whose leading `energies` hold a share 1 - eps of `total`, or all of them."""
    held = torch.cumsum(energies, dim=0)
    short = int((held < (1 - eps) * total).sum())
    return max(1, min(short + 1, energies.numel()))


def _sketch(matrix: Tensor, directions: int, name: str) -> Tensor:
    """(directions, n): the part of `matrix` in the span of about its leading left vectors."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    start = torch.randn(matrix.shape[1], directions, generator=generator).to(matrix.device)
    right = orthonormal_columns(matrix.T @ orthonormal_columns(matrix @ start))
    return orthonormal_columns(matrix @ right).T @ matrix
