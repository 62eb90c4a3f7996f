"""Bytes of a rank on its GPU and on its host.

Optimizer state as in ZeRO (arXiv 1910.02054, stage 1) with DeepSpeed's pipeline: each replica holds
all weights and gradients of its stage and a share of the fp32 masters and moments. 1F1B keeps as
many micro-batches as there are stages from here to the last (arXiv 2104.04473); their bytes, with
and without checkpointing, are traced (`dsx.planning.trace`), not derived from a formula
(arXiv 2205.05198 has one for GPT).
"""

from dataclasses import dataclass

from dsx.planning.costs import StageCost
from dsx.settings.settings import Settings

_BUFFERS = 2
"""DeepSpeed's schedule has at least two micro-batch buffers a stage."""
_HIDDEN_COPIES = 3
"""Of what crosses stages: what was received, its clone for each pass, the gradient's buffer."""
GPU_TEMPORARIES, CPU_TEMPORARIES = 1, 2
"""Of torch's AdamW, each as large as a moment: `foreach` takes a root; tensor by tensor, the
denominator is there as well."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one rank's GPU at the worst moment of an inner step."""

    weights: float
    gradients: float
    optimizer: float
    """fp32 masters and moments, this replica's share."""
    activations: float
    """Kept by micro-batches in flight."""
    working: float
    """Of the micro-batch at hand, beyond what is kept."""
    stepping: float
    """While gradients are reduced and the optimizer steps, when no micro-batch is in flight."""

    @property
    def held(self) -> float:
        """All the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.held + max(self.activations + self.working, self.stepping)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one rank's share of the outer engine on its host, at the worst moment."""

    shared: float
    """Shared weights and outer momentum."""
    feedback: float
    """Error feedback."""
    exchange: float
    """The local weights at the boundary, the pseudo-gradient, the new residual, the average."""

    @property
    def total(self) -> float:
        return self.shared + self.feedback + self.exchange


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations stage `stage` holds at once under 1F1B."""
    return min(stages - stage, micro_batches)


def moments(settings: Settings) -> int:
    """fp32 values the inner optimizer keeps per parameter, besides the weight."""
    if settings.optimizer.type == "SGD":
        return 1 if settings.optimizer.params.momentum else 0
    return 2


def device_memory(
    settings: Settings,
    cost: StageCost,
    replicas: int,
    micro_batches: int,
    hidden_bytes: float,
) -> DeviceMemory:
    """Of a rank of this stage. `hidden_bytes`: of a micro-batch between two stages."""
    width = 2 if settings.bf16.enabled else 4
    held = in_flight(cost.stage.index, cost.stage.stages, micro_batches)
    crossing = 0.0
    if cost.stage.stages > 1:
        crossing = hidden_bytes * (_HIDDEN_COPIES + max(held, _BUFFERS))
    return DeviceMemory(
        weights=float(width * cost.parameters),
        gradients=4.0 * cost.parameters,
        optimizer=4.0 * (1 + moments(settings)) * cost.parameters / replicas,
        activations=held * cost.kept_bytes + crossing,
        working=cost.working_bytes,
        stepping=stepping(settings, cost.parameters, replicas, GPU_TEMPORARIES),
    )


def stepping(settings: Settings, parameters: int, replicas: int, temporaries: int) -> float:
    """Bytes beyond what a rank holds all the time, at the end of an inner step.

    In fp32, DeepSpeed's ZeRO-1 copies all gradients into a bucket, and this replica's share out of
    it. In bf16 they are reduced where they are.
    """
    share = 4.0 * parameters / replicas
    optimizer = temporaries * share if moments(settings) == 2 else 0.0
    if settings.bf16.enabled:
        return optimizer
    return max(4.0 * parameters + share, share + optimizer)


def host_memory(owned: int, own_residual: bool) -> HostMemory:
    """Of a rank that owns `owned` parameters of the exchange."""
    copy = 4.0 * owned
    return HostMemory(shared=2 * copy, feedback=copy, exchange=(5 if own_residual else 4) * copy)
