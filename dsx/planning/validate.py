"""Predictions beside what `dsx bench link` measured: step time, utilization, bytes, memory.

What a step takes without an exchange is taken from the measurement (its `none` row), and so is what
a process holds before it has a model; everything else is predicted.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from dsx.errors import LaunchError, SettingsError
from dsx.planning.hardware import Gpu
from dsx.planning.layout import Layout, LayoutPlan, Machine, layout_as_set, plan_layout
from dsx.planning.methods import allreduce_bytes
from dsx.planning.plan import Planner, Request
from dsx.planning.time import Link
from dsx.settings.loading import load_settings
from dsx.settings.settings import Settings

TIME_BOUND, BYTES_BOUND, MEMORY_BOUND = 0.10, 0.05, 0.10
RATES = ("4mbit", "16mbit", "64mbit")
MODELS: Mapping[str, Mapping[str, int]] = {
    "2M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4},
    "6M": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 4},
    "14M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4},
}
"""Changes of the settings file's model."""
METHODS = ("allreduce", "dsx")
STEPS = 80
"""Inner steps of a measured run: whole rounds in its last two thirds."""
FRAME = 1.0045
"""Bytes that an interface counts per byte of payload: headers of packets that the sender's kernel
hands over in pieces of up to 64 KiB, and answers."""
CONTROL_BYTES_PER_SECOND = 600.0
"""Of a cluster besides its rounds: torchft's heartbeats and quorums."""
_FLOOR = "import dsx.training.run, dsx.exchange.torchft"
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


def measure(config: str, overrides: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    """Run `dsx bench link` for every model and rate; what `checks` takes.

    Raises LaunchError when a bench fails.
    """
    runs = []
    for model in models:
        changed = [*overrides, *_overrides(model)]
        for rate in RATES:
            words = ["bench", "link", "--deepspeed_config", config, "--rate", rate]
            words += ["--methods", ",".join(METHODS), "--speed-only", "--json", "--set", *changed]
            runs.append({"model": model, "rate": rate, "overrides": changed, **_dsx(words)})
    return {"config": config, "floor_bytes": floor_bytes(), "runs": runs}


def floor_bytes() -> int:
    """What a rank's process holds when everything is imported and nothing is built."""
    code = f"import resource\n{_FLOOR}\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"a process with dsx alone could not be measured: {done.stderr}")
    return 1024 * int(done.stdout.split()[-1])


def read_measured(path: Path) -> dict[str, Any]:
    """What `measure` gave, from a file. Raises SettingsError."""
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"--from {path}: no JSON can be read there: {error}") from None
    if not {"config", "floor_bytes", "runs"} <= set(read):
        raise SettingsError(f"--from {path}: not what `dsx plan --validate --json` writes")
    return read


def checks(measured: Mapping[str, Any]) -> Iterator[Check]:
    """Every prediction beside its measurement."""
    for run in measured["runs"]:
        settings = load_settings(measured["config"], run["overrides"])
        predictor = _Predictor(settings, run, measured["floor_bytes"])
        for row in run["rows"]:
            yield from predictor.row(row)


def _overrides(model: str) -> list[str]:
    sizes = [f"dsx.model.config.{key}={value}" for key, value in MODELS[model].items()]
    return [*sizes, f"dsx.training.steps={STEPS}"]


def _dsx(words: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dsx.cli.main", *words], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise LaunchError(f"`dsx {' '.join(words)}` ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class _Predictor:
    """Of one model on one link."""

    def __init__(self, settings: Settings, run: Mapping[str, Any], floor: int) -> None:
        self._settings = settings
        self._run = run
        self._floor = floor
        self._clusters: int = run["clusters"]
        self._planner = Planner(settings)
        none = next(row for row in run["rows"] if row["method"] == "none")
        layout = layout_as_set(settings, settings.dsx.pipeline.stages)
        self._tokens = layout.sequences * settings.dsx.data.seq_len
        self._step = self._clusters * self._tokens / none["tokens_per_second"]
        self._plan = self._layout(layout)

    def row(self, row: Mapping[str, Any]) -> Iterator[Check]:
        """Predictions about one method."""
        if row["method"] == "none":
            yield self._memory(row, exchanges=False)
            return
        link = Link(row["rate"], 0.0)
        seconds, sent = self._round(row, link)
        steps = 1 if row["local_steps"] is None else row["local_steps"]
        step = seconds / steps
        tokens = steps * self._tokens * self._clusters
        measured_step = self._clusters * self._tokens / row["tokens_per_second"]
        # `sent_bytes_per_token`: of all clusters, over all tokens.
        control = 0.0 if row["method"] == "allreduce" else CONTROL_BYTES_PER_SECOND * seconds
        bytes_ = self._clusters * (sent * FRAME + control) / tokens
        yield self._check(row, "step seconds", step, measured_step, TIME_BOUND)
        yield self._check(row, "utilization", self._step / step, row["utilization"], TIME_BOUND)
        yield self._check(row, "bytes a token", bytes_, row["sent_bytes_per_token"], BYTES_BOUND)
        if row["method"] == "dsx":
            yield self._memory(row, exchanges=True)

    def _round(self, row: Mapping[str, Any], link: Link) -> tuple[float, float]:
        """(seconds, bytes that a cluster sends) of a round, or of a step of all-reduce."""
        parameters = self._planner.model.parameter_counts().total
        width = 2 if self._settings.bf16.enabled else 4
        if row["method"] == "allreduce":
            sent = allreduce_bytes(parameters, self._clusters, width)
            return self._step + link.seconds(sent, 0), sent
        stages = self._settings.dsx.pipeline.stages
        asked = Request(self._settings, self._clusters, stages, _CPU, link, as_set=True)
        outer_plan = self._planner.outer(asked, self._with_step())
        return outer_plan.time.seconds, outer_plan.traffic.bytes

    def _layout(self, layout: Layout) -> LayoutPlan:
        return plan_layout(self._settings, self._planner.costs, layout, Machine(_CPU, 1.0))

    def _with_step(self) -> LayoutPlan:
        """The layout, at the speed that was measured."""
        ideal = self._plan.step
        share = (ideal.compute + ideal.bubble) / self._step
        return plan_layout(
            self._settings, self._planner.costs, self._plan.layout, Machine(_CPU, share)
        )

    def _memory(self, row: Mapping[str, Any], *, exchanges: bool) -> Check:
        """Of the largest rank: on a CPU its GPU's and its host's part are one."""
        parts = [
            device.total + (host.total if exchanges else 0.0)
            for device, host in zip(self._plan.memory, self._plan.host, strict=True)
        ]
        largest = max(row["peak_rank_bytes"].values(), default=0)
        return self._check(row, "largest rank", self._floor + max(parts), largest, MEMORY_BOUND)

    def _check(
        self, row: Mapping[str, Any], what: str, predicted: float, measured: float, bound: float
    ) -> Check:
        run = self._run
        return Check(run["model"], run["rate"], row["method"], what, predicted, measured, bound)


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
