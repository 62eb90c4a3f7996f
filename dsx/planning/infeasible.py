"""What to change when no layout fits."""

from collections.abc import Sequence

from dsx.planning.costs import ModelCosts
from dsx.planning.hardware import RESERVED_BYTES
from dsx.planning.layout import LayoutPlan, Machine, cluster_batch, layouts, plan_layout
from dsx.settings.settings import Settings
from dsx.tracking.text import bytes_text

_MOST_TIMES = 8


def explain(
    settings: Settings,
    costs: ModelCosts,
    plans: Sequence[LayoutPlan],
    gpus: int,
    machine: Machine,
) -> str:
    """The nearest layout, by how much it misses, and what would fit."""
    batch = cluster_batch(settings, gpus)
    if not plans:
        return (
            f"a batch of {batch} sequences can't be dealt out to {gpus} GPUs: no number of stages "
            f"(a divisor of {gpus}, at most {costs.plan.layer_count} layers) leaves every replica "
            f"the same part of it; make train_batch_size (or gradient_accumulation_steps) a "
            f"multiple of {gpus}"
        )
    gpu = machine.gpu
    nearest = min(plans, key=lambda p: (p.device_bytes > gpu.usable, p.device_bytes))
    layout, stage = nearest.layout, nearest.costs[nearest.tightest].stage
    where = (
        f"{layout.stages} stages x {layout.replicas} replicas, micro-batches of "
        f"{layout.micro_batch}" + (", layers recomputed" if layout.checkpointing else "")
    )
    if nearest.device_bytes <= gpu.usable:
        return (
            f"the outer state does not fit the hosts: {where} needs "
            f"{bytes_text(nearest.node_host_bytes)} on a node of {gpu.per_node} GPUs, which has "
            f"{bytes_text(gpu.host_memory)}; take nodes with more memory (--gpu host_memory=...) "
            "or more GPUs per cluster"
        )
    memory = nearest.memory[nearest.tightest]
    needed = nearest.device_bytes + RESERVED_BYTES
    parts = ", ".join(
        f"{name} {bytes_text(getattr(memory, name))}"
        for name in ("weights", "gradients", "optimizer", "activations", "working")
    )
    ways = [f"GPUs of {bytes_text(needed)}", *_more_gpus(settings, costs, gpus, machine, batch)]
    if settings.dsx.data.seq_len > 1024:
        ways.append(f"shorter sequences (dsx.data.seq_len is {settings.dsx.data.seq_len})")
    return (
        f"no layout fits {gpu.name}: the nearest, {where}, needs {bytes_text(needed)} on stage "
        f"{stage.index} (layers {stage.start} to {stage.stop - 1}: {parts}), and a GPU has "
        f"{bytes_text(gpu.memory)}; use {', or '.join(ways)}"
    )


def _more_gpus(
    settings: Settings, costs: ModelCosts, gpus: int, machine: Machine, batch: int
) -> list[str]:
    fixed = settings.model_copy(update={"train_batch_size": batch})
    for times in range(2, _MOST_TIMES + 1):
        for layout in layouts(fixed, times * gpus, costs.plan.layer_count):
            if plan_layout(fixed, costs, layout, machine).fits:
                return [f"{times * gpus} GPUs per cluster"]
    return []
