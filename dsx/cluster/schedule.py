"""The inner learning rate as a closed formula of the inner step."""

import math

from dsx.settings.settings import Settings


def learning_rate(step: int, settings: Settings) -> float:
    """The learning rate of inner step `step`, counted from 0 over the whole run.

    With L = `optimizer.params.lr`, N = `dsx.training.steps`, W = `schedule.warmup_steps` and
    m = `schedule.min_ratio`:

    * step < W: L (step + 1) / W, so that the first step already learns and step W - 1 has L;
    * after that, with p = (step - W) / (N - W) in [0, 1]: L for `constant`,
      L (1 - (1 - m) p) for `linear`, L (m + (1 - m) (1 + cos(pi p)) / 2) for `cosine`.

    A pure function: resuming needs the step and nothing else. Steps beyond N keep L m (or L).
    """
    peak = settings.deepspeed_config()["optimizer"]["params"]["lr"]
    training = settings.dsx.training
    return peak * schedule_factor(
        step,
        kind=training.schedule.type,
        steps=training.steps,
        warmup_steps=training.schedule.warmup_steps,
        min_ratio=training.schedule.min_ratio,
    )


def schedule_factor(
    step: int, *, kind: str, steps: int, warmup_steps: int, min_ratio: float
) -> float:
    """`learning_rate` without the settings: the rate of `step` over the largest one."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - (1.0 - min_ratio) * progress
    if kind == "cosine":
        return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"unknown schedule {kind!r}: use cosine, linear or constant")
