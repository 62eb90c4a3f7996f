"""What each part of a model costs, so that any stage of any layout is a sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from dsx.cluster.ownership import assign_owners
from dsx.models.partition import StageRange
from dsx.models.plan import ModelPlan
from dsx.models.shrink import shallow
from dsx.planning.trace import Cost, trace

Partition = Literal["parameters", "uniform"] | Sequence[int]


@dataclass(frozen=True)
class StageCost:
    """One stage of a layout."""

    stage: StageRange
    parameters: int
    forward_flops: float
    """Of one micro-batch."""
    backward_flops: float
    kept_bytes: float
    """Of one micro-batch between its forward and its backward pass."""
    working_bytes: float
    """Beyond what is kept, while a micro-batch is worked on."""

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops


class ModelCosts:
    """The parts of one model, each traced once.

    Layers of equal shapes cost the same. A stage's operations and kept bytes are the sums of its
    parts; what it needs beyond them while it works is the most that one of its parts needs.

    Raises ModelError as `trace` does.
    """

    def __init__(self, plan: ModelPlan, seq_len: int, dtype: torch.dtype) -> None:
        self.plan = plan
        self.seq_len = seq_len
        self.dtype = dtype
        self._kinds = plan.layer_kinds
        self._few = ModelPlan(shallow(plan.config))
        self._trace = cache(self._traced)
        self._split = cache(plan.partition)
        self._owned = cache(self._most_owned)
        counts = plan.parameter_counts()
        self._counts = counts

    @property
    def hidden_bytes(self) -> float:
        """What crosses from stage to stage, of one sequence."""
        return float(self.seq_len * self.plan.hidden_size * self.dtype.itemsize)

    def parameters(self, stage: StageRange) -> int:
        """Of a stage; a tied matrix counts on both stages that hold it."""
        counts = self._counts
        own = sum(counts.layers[stage.start : stage.stop])
        own += counts.embedding * stage.is_first + counts.head * stage.is_last
        return own - counts.tied * (stage.is_first and stage.is_last)

    def owned(self, stage: StageRange, replicas: int) -> int:
        """Parameters of the exchange that the replica with most of this stage owns."""
        return self._owned(stage, replicas)

    def split(self, stages: int, how: Partition) -> list[StageRange]:
        """As `ModelPlan.partition`."""
        return self._split(stages, how if isinstance(how, str) else tuple(how))

    def _most_owned(self, stage: StageRange, replicas: int) -> int:
        sizes = {n: s.numel() for n, s in self.plan.stage_shapes(stage).items()}
        load = [0] * replicas
        for name, owner in assign_owners(sizes, replicas).items():
            load[owner] += sizes[name]
        return max(load)

    def stage(self, stage: StageRange, micro_batch: int, checkpointing: bool) -> StageCost:
        """Cost of one micro-batch of `micro_batch` sequences on `stage`."""
        parts = [self._layer(self._kinds[i], checkpointing) for i in range(stage.start, stage.stop)]
        forward = sum(cost.forward_flops for cost in parts)
        backward = sum(cost.backward_flops for cost in parts)
        kept = sum(cost.kept_bytes for cost in parts)
        working = max(self._working(kind, checkpointing) for kind in set(self._of(stage)))
        ends = [(stage.is_first, self._first_end), (stage.is_last, self._last_end)]
        for there, end in ends:
            if there:
                whole, layer = end(checkpointing)
                forward += whole.forward_flops - layer.forward_flops
                backward += whole.backward_flops - layer.backward_flops
                kept += whole.kept_bytes - layer.kept_bytes
                working = max(working, whole.peak_bytes - whole.kept_bytes)
        return StageCost(
            stage,
            self.parameters(stage),
            float(micro_batch * forward),
            float(micro_batch * backward),
            float(micro_batch * kept),
            float(micro_batch * working),
        )

    def _of(self, stage: StageRange) -> tuple[int, ...]:
        return self._kinds[stage.start : stage.stop]

    def _layer(self, kind: int, checkpointing: bool) -> Cost:
        return self._trace(StageRange(1, 3, kind, kind + 1), checkpointing)

    def _working(self, kind: int, checkpointing: bool) -> int:
        """Two layers, where there are: what one leaves is there while the other works."""
        stop = min(kind + 2, self._few.layer_count)
        pair = self._trace(StageRange(1, 3, kind, stop), checkpointing)
        return pair.peak_bytes - pair.kept_bytes

    def _first_end(self, checkpointing: bool) -> tuple[Cost, Cost]:
        whole = self._trace(StageRange(0, 3, 0, 1), checkpointing)
        return whole, self._layer(self._kinds[0], checkpointing)

    def _last_end(self, checkpointing: bool) -> tuple[Cost, Cost]:
        last = self._few.layer_count - 1
        whole = self._trace(StageRange(2, 3, last, last + 1), checkpointing)
        return whole, self._layer(self._few.layer_kinds[-1], checkpointing)

    def _traced(self, stage: StageRange, checkpointing: bool) -> Cost:
        return trace(self._few, stage, 1, self.seq_len, self.dtype, checkpointing)
