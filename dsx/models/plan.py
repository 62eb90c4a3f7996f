"""What a model consists of and how it can be split, known without giving it memory."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from transformers import PretrainedConfig

from dsx.models.anatomy import AddsNothing
from dsx.models.build import build_stage
from dsx.models.partition import ParameterCounts, StageRange, split_layers
from dsx.models.skeleton import build_skeleton, layer_kind
from dsx.models.stage import Stage


class ModelPlan:
    """A causal LM on the meta device: names, shapes, counts, partitions, and stages from it.

    Attributes:
        config: the unsplit model's config.
        layer_count: its layers.
        parameter_shapes: from state-dict name to shape; a tied matrix once, under the name that
            checkpoints keep.
        buffer_shapes: the same for persistent buffers (few families have any).
        layer_kinds: of each layer, a number that is the same for layers of the same modules, shapes
            and switches.
        hidden_size: width of what crosses from stage to stage.
        vocab_size: rows of the embedding; token ids must be below it.
        max_positions: the longest sequence that learned position embeddings allow; None if the
            family computes positions.
        tied_name: the state-dict name of the matrix that embedding and output layer share, or
            None.

    Raises ModelError if the family can't be split.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        skeleton = build_skeleton(config)
        self.config = config
        self.layer_count = len(skeleton.layers)
        kinds = [layer_kind(layer) for layer in skeleton.layers]
        self.layer_kinds = tuple(kinds.index(kind) for kind in kinds)
        self.hidden_size: int = skeleton.decoder.config.hidden_size
        self.vocab_size: int = getattr(skeleton.decoder, skeleton.anatomy.embedding).num_embeddings
        learned = AddsNothing in skeleton.anatomy.first_only.values()
        self.max_positions: int | None = config.max_position_embeddings if learned else None
        self.tied_name = skeleton.tied
        names, lm = skeleton.names, skeleton.lm
        self.parameter_shapes: dict[str, torch.Size] = {
            names[id(p)]: p.shape for p in lm.parameters()
        }
        self.buffer_shapes: dict[str, torch.Size] = {
            names[id(b)]: b.shape for b in lm.buffers() if id(b) in names
        }
        self._owner = skeleton.anatomy.owner

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer are one matrix."""
        return self.tied_name is not None

    @cached_property
    def _counts(self) -> ParameterCounts:
        sums: dict[str | int | None, int] = {}
        for name, shape in self.parameter_shapes.items():
            owner = self._owner(name)
            sums[owner] = sums.get(owner, 0) + shape.numel()
        shared = self.parameter_shapes[self.tied_name].numel() if self.tied_name else 0
        missing = (
            "head" if self.tied_name and self._owner(self.tied_name) != "head" else "embedding"
        )
        if shared:
            sums[missing] = sums.get(missing, 0) + shared
        return ParameterCounts(
            embedding=sums.get("embedding", 0),
            layers=tuple(sums.get(i, 0) for i in range(self.layer_count)),
            head=sums.get("head", 0),
            tied=shared,
        )

    def parameter_counts(self) -> ParameterCounts:
        """Parameters of the embedding, each layer and the head; exact."""
        return self._counts

    def partition(
        self, stages: int, how: Literal["parameters", "uniform"] | Sequence[int] = "parameters"
    ) -> list[StageRange]:
        """Deals the layers out to `stages` stages; see `split_layers`. Raises ModelError."""
        return split_layers(self._counts, stages, how)

    def part_of(self, name: str) -> "str | int | None":
        """ "embedding", the index of a layer, or "head": where a state-dict name belongs."""
        return self._owner(name)

    def stage_shapes(self, stage: StageRange) -> dict[str, torch.Size]:
        """Names and shapes of the parameters of `stage`, a tied matrix with the first stage only:
        what the ranks of that stage exchange with other clusters."""
        parts: list[str | int] = [*range(stage.start, stage.stop)]
        parts = [*["embedding"] * stage.is_first, *parts, *["head"] * stage.is_last]
        shapes: dict[str, torch.Size] = {}
        for part in parts:
            shapes |= self._shapes_of.get(part, {})
        if self.tied_name is not None:
            shapes.pop(self.tied_name, None)
            if stage.is_first:
                shapes[self.tied_name] = self.parameter_shapes[self.tied_name]
        return shapes

    @cached_property
    def _shapes_of(self) -> dict[str | int | None, dict[str, torch.Size]]:
        """Names and shapes of each part of the model."""
        parts: dict[str | int | None, dict[str, torch.Size]] = {}
        for name, shape in self.parameter_shapes.items():
            parts.setdefault(self._owner(name), {})[name] = shape
        return parts

    def build_stage(
        self, stage: StageRange, seed: int | None, activation_checkpointing: bool = False
    ) -> Stage:
        """Builds one stage, fp32 on the CPU; only its own tensors get memory.

        Args:
            stage: one of `partition`'s results.
            seed: of the initial weights, which are the same for every partition; None leaves the
                parameters NaN, for `load_pretrained` to fill.
            activation_checkpointing: recompute each layer in the backward pass.

        Raises ModelError if the family can't be initialised or recomputed.
        """
        return build_stage(build_skeleton(self.config), stage, seed, activation_checkpointing)
