"""A product of two matrices that is the same on every machine.

Clusters must decode the same bytes to the same bits, and floating-point products depend on the
order of summation: on the processor, its BLAS and its threads. Here every term is made a multiple
of one number, coarse enough for the whole sum to fit the 53 bits of fp64. Then nothing is rounded
on the way, whatever the order, and once at the end, to fp32.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_FP64_BITS = 53
_CHUNK = 1 << 22
"""Entries of the product that exist in fp64 at a time."""


def exact_product(p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """p^T q (fp32, (m, n)) of p (fp32, (r, m)) and q (fp32, (r, n)), in `out` if given.

    Entries of p and q are first rounded to multiples of 2^-b of a power of two above the largest,
    b = (52 - log2 r) / 2, 23 at rank 64: about fp32's own precision.
    """
    if out is None:
        out = torch.empty(p.shape[1], q.shape[1], device=p.device)
    for rows, product in _pieces(p, q):
        out[rows] = product
    return out


def subtract_product(matrix: Tensor, p: Tensor, q: Tensor) -> None:
    """Subtract `exact_product(p, q)` from `matrix` (fp32, (m, n)), in place."""
    for rows, product in _pieces(p, q):
        matrix[rows] -= product


def _pieces(p: Tensor, q: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of p^T q after the other."""
    (rank, rows), columns = p.shape, q.shape[1]
    bits = (_FP64_BITS - 1 - math.ceil(math.log2(max(rank, 1)))) // 2
    left, right = _on_grid(p, bits).T, _on_grid(q, bits)
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, start + step), (left[start : start + step] @ right).float()


def _on_grid(x: Tensor, bits: int) -> Tensor:
    """fp64 `x`, rounded to multiples of 2^(e - bits), 2^e being the power of two above |x|."""
    x = x.double()
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0.0:
        return x
    step = 2.0 ** (math.frexp(largest)[1] - bits)
    return torch.round(x / step) * step
