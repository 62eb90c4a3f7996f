"""Sets runs against their baselines: the share of the gap kept, and means over seeds."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsx.simulation.result import RunResult
from dsx.simulation.spec import RunSpec
from dsx.simulation.sweep import applies_to_baselines

Finished = tuple[RunSpec, RunResult]


@dataclass(frozen=True)
class Row:
    """One choice of settings over its seeds."""

    name: str
    runs: tuple[Finished, ...]
    kept: tuple[float, ...]
    """Per seed, in the order of `runs`; empty without both baselines."""
    best: bool
    """Of the baselines of its kind, the one that everything is compared with."""

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return _mean_loss(self.runs)

    @property
    def loss_deviation(self) -> float:
        """Standard deviation over the seeds; NaN for one."""
        losses = [result.loss for _, result in self.runs]
        return statistics.stdev(losses) if len(losses) > 1 else math.nan

    @property
    def kept_mean(self) -> float | None:
        """Mean of `kept`; None without baselines."""
        return statistics.fmean(self.kept) if self.kept else None


def share_kept(loss: float, alone: float, allreduce: float) -> float:
    """`(alone - loss) / (alone - allreduce)`: 1 is as good as per-step all-reduce, 0 as no peer."""
    gap = alone - allreduce
    return (alone - loss) / gap if gap else math.nan


def rows(finished: Sequence[Finished]) -> list[Row]:
    """One row per choice of settings, in the order of their first runs.

    Compared with the best baselines (lowest mean loss over the seeds, whatever their tuning) that
    share model, data and training length, seed by seed.
    """
    groups: dict[str, list[Finished]] = {}
    for spec, result in finished:
        groups.setdefault(_choice(spec), []).append((spec, result))
    best = _best_baselines(groups)
    out = []
    for runs in groups.values():
        spec = runs[0][0]
        where = _comparable(spec)
        pair = [best.get(f"{kind} {where}") for kind in ("single", "allreduce")]
        kept: list[float] = []
        if pair[0] is not None and pair[1] is not None:
            alone, joined = ({s.seed: r.loss for s, r in runs_} for runs_ in pair if runs_)
            if all(s.seed in alone and s.seed in joined for s, _ in runs):
                kept = [share_kept(r.loss, alone[s.seed], joined[s.seed]) for s, r in runs]
        is_best = runs is best.get(f"{spec.kind} {where}")
        out.append(Row(_label(spec), tuple(runs), tuple(kept), is_best))
    return out


def _label(spec: RunSpec) -> str:
    if spec.kind == "clusters":
        return spec.name
    told = " ".join(f"{key}={value}" for key, value in spec.changed.items() if key != "dsx.seed")
    return f"{spec.kind} {told}".rstrip()


def _choice(spec: RunSpec) -> str:
    changed = {key: value for key, value in spec.changed.items() if key != "dsx.seed"}
    return json.dumps([spec.kind, spec.clusters, spec.inner, changed], sort_keys=True)


def _comparable(spec: RunSpec) -> str:
    """What runs must share to be compared."""
    changed = {
        key: value
        for key, value in spec.changed.items()
        if applies_to_baselines(key) and key != "dsx.seed"
    }
    return json.dumps([spec.clusters, spec.inner, changed], sort_keys=True)


def _best_baselines(groups: dict[str, list[Finished]]) -> dict[str, list[Finished]]:
    """By kind and what makes runs comparable: the baseline of lowest mean loss."""
    best: dict[str, list[Finished]] = {}
    for runs in groups.values():
        spec = runs[0][0]
        if spec.kind == "clusters":
            continue
        key = f"{spec.kind} {_comparable(spec)}"
        if key not in best or _mean_loss(runs) < _mean_loss(best[key]):
            best[key] = runs
    return best


def _mean_loss(runs: Sequence[Finished]) -> float:
    return statistics.fmean(result.loss for _, result in runs)
