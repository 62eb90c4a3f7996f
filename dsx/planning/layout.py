"""How a cluster's GPUs are dealt out, what each layout needs and how fast it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dsx.planning.costs import ModelCosts, StageCost
from dsx.planning.hardware import Gpu
from dsx.planning.memory import DeviceMemory, HostMemory, device_memory, host_memory
from dsx.planning.time import StepTime, pipeline, ring
from dsx.settings.settings import Settings

_LARGEST_MICRO_BATCH = 16


@dataclass(frozen=True)
class Layout:
    """Stages x replicas, and how a replica's share of the batch is cut."""

    stages: int
    replicas: int
    micro_batch: int
    """Sequences of one micro-batch."""
    micro_batches: int
    """Of one inner step and replica."""
    checkpointing: bool

    @property
    def sequences(self) -> int:
        """Of one inner step of the cluster."""
        return self.replicas * self.micro_batch * self.micro_batches


@dataclass(frozen=True)
class Machine:
    """What a layout runs on, and how well."""

    gpu: Gpu
    utilization: float
    """Share of the peak while computing."""

    def rate(self, ranks: int) -> float:
        """Bits per second between neighbours among `ranks` consecutive ranks."""
        return self.gpu.nvlink if ranks <= self.gpu.per_node else self.gpu.network


@dataclass(frozen=True)
class LayoutPlan:
    """A layout on a machine: memory by stage, time of a step."""

    layout: Layout
    machine: Machine
    costs: tuple[StageCost, ...]
    memory: tuple[DeviceMemory, ...]
    host: tuple[HostMemory, ...]
    """Of each stage's rank that owns most."""
    step: StepTime

    @cached_property
    def tightest(self) -> int:
        """The stage that needs most of its GPU."""
        return max(range(len(self.memory)), key=lambda index: self.memory[index].total)

    @property
    def device_bytes(self) -> float:
        return self.memory[self.tightest].total

    @property
    def node_host_bytes(self) -> float:
        """Of the fullest node's host, if all of its ranks were like the fullest."""
        ranks = min(self.machine.gpu.per_node, self.layout.stages * self.layout.replicas)
        return ranks * max(host.total for host in self.host)

    @property
    def fits(self) -> bool:
        gpu = self.machine.gpu
        return self.device_bytes <= gpu.usable and self.node_host_bytes <= gpu.host_memory

    def bubble_share(self) -> float:
        """(S - 1) / (M + S - 1)."""
        return (self.layout.stages - 1) / (self.layout.micro_batches + self.layout.stages - 1)


def layouts(settings: Settings, gpus: int, layers: int) -> Iterator[Layout]:
    """Every layout of `gpus` GPUs that trains the settings' batch.

    The batch of an inner step stays as the settings have it. Checkpointing that they ask for
    stays on.
    """
    batch = cluster_batch(settings, gpus)
    choices = (True,) if settings.dsx.pipeline.activation_checkpointing else (False, True)
    for stages in range(1, min(gpus, layers) + 1):
        replicas = gpus // stages
        if gpus % stages or batch % replicas:
            continue
        share = batch // replicas
        for micro in range(1, min(share, _LARGEST_MICRO_BATCH) + 1):
            if share % micro == 0:
                for checkpointing in choices:
                    yield Layout(stages, replicas, micro, share // micro, checkpointing)


def layout_as_set(settings: Settings, gpus: int) -> Layout:
    """The layout that the settings say, on `gpus` GPUs."""
    pipeline_ = settings.dsx.pipeline
    return Layout(
        pipeline_.stages,
        gpus // pipeline_.stages,
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        pipeline_.activation_checkpointing,
    )


def cluster_batch(settings: Settings, gpus: int) -> int:
    """Sequences of an inner step of one cluster: as given, or as the settings' own layout makes."""
    if settings.train_batch_size is not None:
        return settings.train_batch_size
    replicas = max(1, gpus // settings.dsx.pipeline.stages)
    return settings.train_micro_batch_size_per_gpu * settings.gradient_accumulation_steps * replicas


def plan_layout(
    settings: Settings, costs: ModelCosts, layout: Layout, machine: Machine
) -> LayoutPlan:
    """What `layout` needs and how long its step takes. Raises ModelError if it can't be split."""
    how = settings.dsx.pipeline.partition
    if isinstance(how, list) and len(how) != layout.stages:
        how = "parameters"
    stages = costs.split(layout.stages, how)
    stage_costs = tuple(
        costs.stage(stage, layout.micro_batch, layout.checkpointing) for stage in stages
    )
    hidden = costs.hidden_bytes * layout.micro_batch
    memory = tuple(
        device_memory(settings, cost, layout.replicas, layout.micro_batches, hidden)
        for cost in stage_costs
    )
    residual = settings.dsx.outer.own_residual == "all"
    host = tuple(host_memory(costs.owned(stage, layout.replicas), residual) for stage in stages)
    step = _step(settings, layout, machine, stage_costs, hidden)
    return LayoutPlan(layout, machine, stage_costs, memory, host, step)


def _step(
    settings: Settings,
    layout: Layout,
    machine: Machine,
    costs: tuple[StageCost, ...],
    hidden: float,
) -> StepTime:
    turn = max(c.flops for c in costs) / (machine.gpu.tflops * 1e12 * machine.utilization)
    compute, bubble = pipeline(turn, layout.micro_batches, layout.stages)
    transfers = 0.0
    if layout.stages > 1:
        between = machine.rate(layout.stages * layout.replicas)
        turns = layout.micro_batches + layout.stages - 1
        transfers = turns * 2 * 8 * hidden / between
    largest = max(cost.parameters for cost in costs)
    among = machine.rate(layout.replicas)
    width = 4 if settings.communication_data_type == "fp32" else 2
    weights = 2 if settings.bf16.enabled else 4
    # Sharing the weights of ZeRO-1 after a step is half of an all-reduce.
    reduce = ring((width + weights / 2) * largest, layout.replicas, among)
    return StepTime(compute, bubble, transfers, reduce)
