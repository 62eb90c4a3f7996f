"""What to change when no layout fits."""

import math
from collections.abc import Sequence

from dsx.planning.costs import ModelCosts
from dsx.planning.hardware import RESERVED_BYTES
from dsx.planning.layout import (
    Layout,
    LayoutPlan,
    Machine,
    cluster_batch,
    layouts,
    plan_layout,
)
from dsx.settings.settings import Settings
from dsx.tracking.text import bytes_text

_MOST_TIMES = 8
"""As many times the GPUs are tried; fewer GPUs than `_MOST_REPLICAS` stages of one layer, too."""
_MOST_REPLICAS = 2


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
    stage = nearest.costs[nearest.tightest].stage
    where = _in_words(nearest.layout)
    other = _other_layout(settings, costs, gpus, machine, batch)
    if nearest.device_bytes <= gpu.usable:
        return (
            f"the outer state does not fit the hosts: {where}, needs "
            f"{bytes_text(nearest.node_host_bytes)} on a node of {gpu.per_node} GPUs, which has "
            f"{bytes_text(gpu.host_memory)}; take "
            f"{', or '.join([*other, 'nodes with more memory (--gpu host_memory=...)'])}"
        )
    memory = nearest.memory[nearest.tightest]
    needed = nearest.device_bytes + RESERVED_BYTES
    parts = ", ".join(
        f"{name} {bytes_text(getattr(memory, name))}"
        for name in ("weights", "gradients", "optimizer", "activations", "working")
    )
    # Rounded up as it is shown, so that such a GPU does.
    shown = 10.0 ** (math.floor(math.log10(needed)) - 2)
    enough = bytes_text(math.ceil(needed / shown) * shown)
    ways = [*other, f"GPUs of {enough} (--gpu memory=...)"]
    if settings.dsx.data.seq_len > 1024:
        ways.append(f"shorter sequences (dsx.data.seq_len is {settings.dsx.data.seq_len})")
    return (
        f"no layout fits {gpu.name}: the nearest, {where}, needs {bytes_text(needed)} on stage "
        f"{stage.index} (layers {stage.start} to {stage.stop - 1}: {parts}), and a GPU has "
        f"{bytes_text(gpu.memory)}; take {', or '.join(ways)}"
    )


def _other_layout(
    settings: Settings, costs: ModelCosts, gpus: int, machine: Machine, batch: int
) -> list[str]:
    """The fewest GPUs that train the same batch, and how; nothing where more don't help."""
    fixed = settings.model_copy(update={"train_batch_size": batch})
    most = max(_MOST_TIMES * gpus, _MOST_REPLICAS * costs.plan.layer_count)
    for count in range(gpus, most + 1, gpus):
        for layout in layouts(fixed, count, costs.plan.layer_count):
            if plan_layout(fixed, costs, layout, machine).fits:
                how = f"{count} GPUs per cluster"
                if count == gpus:  # only `--as-set` has kept the planner from it
                    how = "the layout without --as-set"
                return [f"{how} ({_in_words(layout)})"]
    return []


def _in_words(layout: Layout) -> str:
    return (
        f"{layout.stages} stages x {layout.replicas} replicas, micro-batches of "
        f"{layout.micro_batch}" + (", layers recomputed" if layout.checkpointing else "")
    )
