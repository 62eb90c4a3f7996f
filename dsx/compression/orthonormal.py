"""Orthonormal bases and least squares in matrix products, for factors of low rank."""

import torch
from torch import Tensor

_TOLERANCE = 1e-4


def orthonormal_columns(a: Tensor) -> Tensor:
    """An orthonormal basis (m, r) whose span holds the columns of `a` (fp32, (m, r), m >= r).

    Cholesky-QR, twice (arXiv 1401.5171), after bringing the columns to length one; Householder QR
    where the columns are too close to dependent for that, zero matrices included.
    """
    if a.numel() == 0:
        return a
    q = _unit_columns(a)
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(q.T @ q)
        if bool(failed):
            return torch.linalg.qr(a).Q
        q = torch.linalg.solve_triangular(factor, q.T, upper=False).T
    excess = q.T @ q
    excess.diagonal().sub_(1)
    if not float(excess.abs().max()) < _TOLERANCE:
        return torch.linalg.qr(a).Q
    return q


def fit(basis: Tensor, matrix: Tensor) -> Tensor:
    """The c (n, r) for which `basis @ c.T` is closest to `matrix` (m, n).

    `basis` (m, r) is nearly orthonormal (it went through a quantizer), or is taken to be so when
    its columns turn out to be dependent.
    """
    product = matrix.T @ basis
    factor, failed = torch.linalg.cholesky_ex(basis.T @ basis)
    if bool(failed):
        return product
    return torch.cholesky_solve(product.T, factor).T


def _unit_columns(a: Tensor) -> Tensor:
    """`a` with columns of length one; zero columns stay zero."""
    largest = a.abs().amax(dim=0)
    a = a / torch.where(largest > 0, largest, 1.0)  # Squares then neither over- nor underflow.
    length = torch.linalg.vector_norm(a, dim=0)
    return a / torch.where(length > 0, length, 1.0)
