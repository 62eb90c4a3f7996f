"""How the outer engine reaches the weights that the inner training owns."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn


class LocalWeights(Protocol):
    """The fp32 master weights of one rank's share of the model, by HF parameter name.

    A share holds whole tensors: those of the rank's stage that this replica owns. Tied copies
    appear once, on the rank that owns them.
    """

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of the owned tensors, in a fixed order."""
        ...

    def fetch(self) -> dict[str, torch.Tensor]:
        """Copies of the owned masters: fp32, on the CPU. Collective inside the cluster."""
        ...

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set owned masters, and all that follows from them. Collective inside the cluster."""
        ...


class ModuleWeights:
    """`LocalWeights` of a plain fp32 module on one device: simulation and unit tests."""

    def __init__(self, module: nn.Module) -> None:
        # named_parameters() yields a tied tensor once, under its first name.
        self._parameters = dict(module.named_parameters())

    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def fetch(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)


def rebase(
    weights: LocalWeights,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    moved: bool,
) -> None:
    """`x = new - (old - x)`: go over to `new`, keeping the displacement made from `old`.

    Args:
        moved: False when `weights` are `old` still.
    """
    if not moved:
        weights.store(new)
        return
    if old is new:
        return
    local = weights.fetch()
    for name, value in local.items():
        local[name] = new[name] - (old[name] - value)
    weights.store(local)
