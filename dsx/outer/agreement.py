"""How the ranks of one cluster come to one decision."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class Agreement(Protocol):
    """Small collectives among all ranks of one cluster, over its fast links."""

    @property
    def is_first(self) -> bool:
        """True on exactly one rank: the one that speaks for the cluster."""
        ...

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over the ranks."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over the ranks, in float64: exact for integers below 2**53."""
        ...


class AloneAgreement:
    """A cluster of one rank agrees with itself. Also an exchange's council."""

    is_first = True

    def broadcast(self, decision: Any = None) -> Any:
        return decision

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)


def total_norm(tensors: Mapping[str, torch.Tensor], agreement: Agreement) -> float:
    """The 2-norm of tensors that are spread over the ranks of a cluster (collective)."""
    squares = sum(float(value.double().square().sum()) for value in tensors.values())
    return agreement.total([squares])[0] ** 0.5
