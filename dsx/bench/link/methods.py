"""What `dsx bench link` compares: how clusters share what they learn, as settings of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsx.errors import SettingsError
from dsx.settings import Settings

METHODS = ("allreduce", "diloco-fp32", "diloco-fp16", "dsx")
NONE = "none"
"""No exchange at all: what utilization is a share of. Always measured first."""

TORCHFT = "torchft"
"""torchft's own DiLoCo, for clusters of one rank."""

_STEPS_ALONE = 400
"""Enough to measure steps between which nothing is exchanged."""
_ALLREDUCE_STEPS = 4
"""Of these the last two thirds count; each takes minutes where the link is slow."""
_DILOCO_ROUNDS = 3
_SPEED_ONLY = ("dsx.training.schedule.warmup_steps=0",)


@dataclass(frozen=True)
class Method:
    """One way to train on all clusters."""

    name: str
    overrides: tuple[str, ...]
    """Of the settings, after the user's own."""
    exchanges: bool = False
    """The outer engine exchanges between the clusters."""
    one_job: bool = False
    """One DeepSpeed job spans the clusters: its replicas are the clusters."""
    torchft: bool = False
    """Not dsx but torchft trains, with `dsx.outer`'s round, outer rate and momentum."""
    speed_steps: int | None = None
    """Inner steps that suffice to measure the speed, where the result does not depend on it: the
    loss then comes from a run of full length on a link that is not shaped. None: a run of full
    length gives both."""


def build_method(name: str, settings: Settings, diloco_steps: int) -> Method:
    """The method of that name.

    Args:
        settings: the user's.
        diloco_steps: inner steps of a round (H) of the `diloco-*` methods.

    Raises:
        SettingsError: there is no such method.
    """
    if name == NONE:
        return Method(name, (), speed_steps=min(_STEPS_ALONE, settings.dsx.training.steps))
    if name == "allreduce":
        # The gradients travel as DeepSpeed's users send them. Replicas are clusters here, so a
        # batch size that is given for one cluster is not that of the job.
        sent = ("communication_data_type=bf16",) if settings.bf16.enabled else ()
        batch = ("train_batch_size=null",)
        return Method(name, batch + sent, one_job=True, speed_steps=_ALLREDUCE_STEPS)
    if name == TORCHFT and settings.dsx.pipeline.stages != 1:
        raise SettingsError(
            "torchft's DiLoCo wraps one module in one process, but dsx.pipeline.stages is "
            f"{settings.dsx.pipeline.stages}; --set dsx.pipeline.stages=1 for all methods"
        )
    if name in ("diloco-fp32", "diloco-fp16", TORCHFT):
        codec = "fp16" if name == "diloco-fp16" else "none"
        outer: dict[str, Any] = {
            "local_steps": diloco_steps,
            "delay": 0,
            "own_residual": "none",
            "lr": 0.7,
            "momentum": 0.9,
            "momentum_warmup_steps": 0,
            "compression": dict.fromkeys(("matrices", "embeddings", "vectors"), codec),
            "adapt": {"local_steps": "fixed"},
        }
        overrides = tuple(f"dsx.outer.{key}={json.dumps(value)}" for key, value in outer.items())
        return Method(
            name,
            overrides,
            exchanges=name != TORCHFT,
            torchft=name == TORCHFT,
            speed_steps=_DILOCO_ROUNDS * diloco_steps,
        )
    if name == "dsx":
        return Method(name, (), exchanges=True)
    raise SettingsError(f"--methods {name}: there are {', '.join((*METHODS, TORCHFT, NONE))}")


def build_methods(names: Sequence[str], settings: Settings, diloco_steps: int) -> list[Method]:
    """The named ones in their order, `none` before them. Raises SettingsError."""
    wanted = names if names and names[0] == NONE else [NONE, *names]
    return [build_method(name, settings, diloco_steps) for name in wanted]


def run_overrides(method: Method, steps: int | None, clusters: int, run_dir: str) -> list[str]:
    """All overrides of one run of `method`; `steps`: fewer inner steps than the settings say."""
    short = (f"dsx.training.steps={steps}", *_SPEED_ONLY) if steps is not None else ()
    return [
        *method.overrides,
        *short,
        f"dsx.run_dir={run_dir}",
        f"dsx.outer.start_clusters={clusters if method.exchanges else 1}",
        "dsx.outer.min_clusters=1",
        "dsx.training.eval_every=0",
        "dsx.checkpoint.every_rounds=0",
        "dsx.tracking.wandb=false",
    ]
