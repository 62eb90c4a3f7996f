"""Predictions beside what `dsx bench link` measured: step time, utilization, bytes, memory.

What a step takes without an exchange is taken from the measurement (its `none` rows), and so is
what a process holds without a model to speak of, and how many inner steps a round had; everything
else is predicted.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dsx.cluster.launch import usable_cores
from dsx.errors import LaunchError, SettingsError
from dsx.planning.hardware import Gpu
from dsx.planning.layout import Layout, LayoutPlan, Machine, layout_as_set, plan_layout
from dsx.planning.memory import CPU_TEMPORARIES, stepping
from dsx.planning.methods import allreduce_bytes, gather_bytes
from dsx.planning.plan import Planner, Request
from dsx.planning.time import Link
from dsx.settings.loading import load_settings
from dsx.settings.settings import Settings

TIME_BOUND, BYTES_BOUND, MEMORY_BOUND = 0.10, 0.05, 0.10
RATES = ("8mbit", "24mbit", "96mbit")
MODELS: Sequence[Mapping[str, int]] = (
    {"hidden_size": 128, "intermediate_size": 344},
    {"hidden_size": 192, "intermediate_size": 512},
    {"hidden_size": 320, "intermediate_size": 896},
)
"""Changes of the settings file's model, for times and bytes."""
NO_MODEL: Mapping[str, int] = {"hidden_size": 16, "intermediate_size": 32}
MEMORY_MODEL: Mapping[str, int] = {"hidden_size": 768, "intermediate_size": 2048}
"""For memory: large beside what a process holds without it."""
MEMORY_STAGES = (1, 2)
METHODS = ("dsx", "allreduce")
"""Behind `none`, which dsx follows at once: a machine's speed drifts."""
STEPS = 80
"""Inner steps of a measured run: whole rounds in its last two thirds."""
MEMORY_STEPS, MEMORY_ROUND = 8, 2
FRAME = 1.055
"""Bytes that an interface counts per byte of payload, when as much goes one way as the other: 66 of
headers for each 1,448, and answers. Measured with gloo's all-reduce: 1.049 to 1.066."""
EXCHANGE_FRAME = 1.077
"""The same of an exchange, in smaller messages. Measured (`dsx bench scale`, from 96 to 1 Mbit/s):
1.072 to 1.096 of the bytes by which 2M parameters send more than 60k."""
GLOO_SHARE = 0.8
"""Of a line's rate that gloo's collectives reach: they wait for one another's pieces. Measured at
8 Mbit/s: 0.88 for one large all-reduce, 0.78 for a gather and for smaller ones."""
OUTER_CPU_SECONDS = 60e-9
"""Of processor time per parameter, cluster and round: the outer engine with the default codecs, for
two clusters in one process. Inner steps lack it where they share the cores."""
CONTROL_BYTES_PER_SECOND = 600.0
"""Of a cluster besides its rounds: torchft's heartbeats and quorums."""
_CPU = Gpu("cpu", 1e12, 1.0, 1e12, 1e12)


@dataclass(frozen=True)
class Check:
    """One prediction and what was measured."""

    model: str
    rate: str
    method: str
    what: str
    predicted: float
    measured: float
    bound: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1 if self.measured else math.inf

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.bound


def measure(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Run `dsx bench link` for every model and rate, and for the memory of a large one; what
    `checks` takes.

    Raises LaunchError when a bench fails.
    """
    runs = []
    for model in MODELS:
        changed = [
            *overrides,
            *_sizes(model),
            f"dsx.training.steps={STEPS}",
            "dsx.training.schedule.warmup_steps=0",
            "dsx.outer.adapt.local_steps=fixed",
        ]
        runs += [_bench(config, rate, METHODS, changed) for rate in RATES]
    short = [
        *overrides,
        f"dsx.training.steps={MEMORY_STEPS}",
        "dsx.training.schedule.warmup_steps=0",
        f"dsx.outer.local_steps={MEMORY_ROUND}",
        "dsx.outer.adapt.local_steps=fixed",
    ]
    nothing = [*short, *_sizes(NO_MODEL), "dsx.pipeline.stages=1"]
    floor = _bench(config, RATES[-1], ("dsx",), nothing)
    memory = [
        _bench(
            config,
            RATES[-1],
            ("dsx",),
            [*short, *_sizes(MEMORY_MODEL), f"dsx.pipeline.stages={stages}"],
        )
        for stages in MEMORY_STAGES
    ]
    # Now and then a rank holds 0.2 GB more for a moment, and none ever less than it needs.
    peaks = [bytes_ for row in floor["rows"] for bytes_ in row["peak_rank_bytes"].values()]
    return {
        "config": config,
        "cores": usable_cores(),
        "floor_bytes": min(peaks),
        "runs": runs,
        "memory": memory,
    }


def read_measured(path: Path) -> dict[str, Any]:
    """What `measure` gave, from a file. Raises SettingsError."""
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"--from {path}: no JSON can be read there: {error}") from None
    if not {"config", "cores", "floor_bytes", "runs", "memory"} <= set(read):
        raise SettingsError(f"--from {path}: not what `dsx plan --validate --json` writes")
    return read


def checks(measured: Mapping[str, Any]) -> Iterator[Check]:
    """Every prediction beside its measurement."""
    for run in measured["runs"]:
        predictor = _Predictor(load_settings(measured["config"], run["overrides"]), run)
        for row in run["rows"]:
            if row["method"] != "none":
                yield from predictor.row(row, measured["cores"])
    for run in measured["memory"]:
        predictor = _Predictor(load_settings(measured["config"], run["overrides"]), run)
        for row in run["rows"]:
            yield predictor.memory(row, measured["floor_bytes"])


def _sizes(model: Mapping[str, int]) -> list[str]:
    return [f"dsx.model.config.{key}={value}" for key, value in model.items()]


def _bench(
    config: str, rate: str, methods: Sequence[str], overrides: Sequence[str]
) -> dict[str, Any]:
    words = ["bench", "link", "--deepspeed_config", config, "--rate", rate]
    words += ["--methods", ",".join(methods), "--speed-only", "--json", "--set", *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "dsx.cli.main", *words], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise LaunchError(f"`dsx {' '.join(words)}` ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {"rate": rate, "overrides": list(overrides), **result}


def _largest_rank(row: Mapping[str, Any]) -> float:
    return float(max(row["peak_rank_bytes"].values()))


class _Predictor:
    """Of one model on one link."""

    def __init__(self, settings: Settings, run: Mapping[str, Any]) -> None:
        self._settings = settings
        self._run = run
        self._clusters: int = run["clusters"]
        self._planner = Planner(settings)
        size = self._planner.model.parameter_counts().total
        stages = settings.dsx.pipeline.stages
        self._name = f"{size / 1e6:.1f}M, {stages} stage{'s' if stages > 1 else ''}"
        alone = [row["tokens_per_second"] for row in run["rows"] if row["method"] == "none"]
        layout = layout_as_set(settings, settings.dsx.pipeline.stages)
        self._tokens = layout.sequences * settings.dsx.data.seq_len
        self._step = self._clusters * self._tokens / statistics.mean(alone)
        self._plan = self._layout(layout)

    def row(self, row: Mapping[str, Any], cores: int) -> Iterator[Check]:
        """Predictions about one method's times and bytes."""
        if row["method"] == "allreduce":
            steps, (seconds, sent) = 1.0, self._allreduce(row["rate"])
            counted = FRAME * sent
        else:
            steps = row["measured_steps"] / row["measured_rounds"]
            seconds, sent = self._round(row["rate"], steps, cores)
            counted = EXCHANGE_FRAME * sent + CONTROL_BYTES_PER_SECOND * seconds
        step = seconds / steps
        tokens = self._tokens * self._clusters
        # `sent_bytes_per_token`: of all clusters, over all tokens.
        bytes_ = self._clusters * counted / (steps * tokens)
        measured_step = tokens / row["tokens_per_second"]
        yield self._check(row, "step seconds", step, measured_step, TIME_BOUND)
        yield self._check(row, "utilization", self._step / step, row["utilization"], TIME_BOUND)
        yield self._check(row, "bytes a token", bytes_, row["sent_bytes_per_token"], BYTES_BOUND)

    def _allreduce(self, rate: float) -> tuple[float, float]:
        """(seconds, bytes that a cluster sends) of a step of DeepSpeed's, with ZeRO-1."""
        parameters = self._planner.model.parameter_counts().total
        width = 2 if self._settings.bf16.enabled else 4
        sent = allreduce_bytes(parameters, self._clusters, width)
        sent += gather_bytes(parameters, self._clusters, width)
        return self._step + 8 * sent * FRAME / (GLOO_SHARE * rate), sent

    def _round(self, rate: float, steps: float, cores: int) -> tuple[float, float]:
        """The same of a round of so many inner steps (their mean)."""
        stages = self._settings.dsx.pipeline.stages
        link = Link(rate, 0.0)
        asked = Request(self._settings, self._clusters, stages, _CPU, link, as_set=True)
        outer_plan = self._planner.outer(asked, self._with_step())
        parameters = self._planner.model.parameter_counts().total
        beside = OUTER_CPU_SECONDS * self._clusters * parameters / cores
        return steps * self._step + outer_plan.time.stalled + beside, outer_plan.traffic.bytes

    def _layout(self, layout: Layout) -> LayoutPlan:
        return plan_layout(self._settings, self._planner.costs, layout, Machine(_CPU, 1.0))

    def _with_step(self) -> LayoutPlan:
        """The layout, at the speed that was measured."""
        ideal = self._plan.step
        share = (ideal.compute + ideal.bubble) / self._step
        return plan_layout(
            self._settings, self._planner.costs, self._plan.layout, Machine(_CPU, share)
        )

    def memory(self, row: Mapping[str, Any], floor: float) -> Check:
        """Of the largest rank; `floor`: bytes that it would hold without the model.

        On a CPU its GPU's and its host's part are one. What micro-batches leave is not given back
        (malloc keeps it), so it is still there while the optimizer steps.
        """
        settings, layout = self._settings, self._plan.layout
        host = [part.total if row["method"] == "dsx" else 0.0 for part in self._plan.host]
        ranks = [
            device.held
            + device.activations
            + device.working
            + stepping(settings, cost.parameters, layout.replicas, CPU_TEMPORARIES)
            + beside
            for device, cost, beside in zip(self._plan.memory, self._plan.costs, host, strict=True)
        ]
        return self._check(
            row, "largest rank", floor + max(ranks), _largest_rank(row), MEMORY_BOUND
        )

    def _check(
        self, row: Mapping[str, Any], what: str, predicted: float, measured: float, bound: float
    ) -> Check:
        model, rate = self._name, self._run["rate"]
        return Check(model, rate, row["method"], what, predicted, measured, bound)


def table(found: Sequence[Check]) -> Table:
    """For people; what misses its bound is marked."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "link", "method", "what"):
        out.add_column(column)
    for column in ("predicted", "measured", "error", "bound", ""):
        out.add_column(column, justify="right")
    for check in found:
        out.add_row(
            check.model,
            check.rate,
            check.method,
            check.what,
            f"{check.predicted:,.4g}",
            f"{check.measured:,.4g}",
            f"{check.error:+.1%}",
            f"{check.bound:.0%}",
            "" if check.holds else "MISSED",
        )
    return out
