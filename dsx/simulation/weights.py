"""The simulated cluster's weights, as the outer engine sees them."""

from collections.abc import Mapping

import torch

from dsx.models.stage import Stage


class StageWeights:
    """`LocalWeights` of an unsplit model: every parameter by its HF name, tied matrices once."""

    def __init__(self, stage: Stage) -> None:
        self._parameters = {
            stage.hf_names[own]: parameter for own, parameter in stage.named_parameters()
        }

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
