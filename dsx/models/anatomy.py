"""Where a causal language model keeps the parts that a pipeline deals out to its stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dsx.errors import ModelError


class AddsNothing(nn.Module):
    """Stands in for a learned position embedding behind the first stage: the sum stays as it is."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """A zero without dimensions; adding it changes neither value nor dtype."""
        device = next((a.device for a in args if isinstance(a, Tensor)), None)
        return torch.zeros((), device=device)


class NotHere(nn.Module):
    """Stands in for a token embedding on stages that receive hidden states."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Raises ModelError: token ids reached a stage that takes hidden states."""
        raise ModelError(
            "a pipeline stage behind the first looked up token ids; it takes hidden states only"
        )


Stub = Callable[[], nn.Module | None]


@dataclass(frozen=True)
class Anatomy:
    """Attribute names of the parts of one causal LM. Everything else in it must be free of weights.

    `decoder` is the path, inside the causal LM, of the module whose forward runs the layers; the
    other names are attributes of that module. `first_only` runs between the embedding and the
    layers, `last_only` behind them; each comes with what replaces it on the other stages.
    """

    decoder: str
    embedding: str
    layers: str
    first_only: Mapping[str, Stub] = field(default_factory=dict)
    last_only: Mapping[str, Stub] = field(default_factory=dict)

    def owner(self, hf_name: str) -> "str | int | None":
        """Which part a state-dict name belongs to: "embedding", a layer's index, or "head".

        None for what lies beside the layers in the decoder: it would exist on every stage.
        """
        prefix = self.decoder + "."
        if not hf_name.startswith(prefix):
            return "head"
        part, _, rest = hf_name.removeprefix(prefix).partition(".")
        if part == self.layers:
            return int(rest.partition(".")[0])
        if part == self.embedding or part in self.first_only:
            return "embedding"
        return "head" if part in self.last_only else None
