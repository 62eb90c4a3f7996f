"""Runs the methods of `dsx bench link` one after the other, and puts their rows together."""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsx.bench.link.launches import (
    COORDINATOR_PORT,
    LIGHTHOUSE_PORT,
    coordinator_url,
    one_job,
    separate_clusters,
    torchft_clusters,
)
from dsx.bench.link.methods import NONE, Method, build_method, build_methods, run_overrides
from dsx.bench.link.rows import measure
from dsx.bench.link.watch import Watch
from dsx.bench.machine import this_machine
from dsx.bench.namespaces import SlowLink
from dsx.cluster.supervise import run_clusters
from dsx.exchange.secret import RunSecret
from dsx.settings import Implied, Settings, load_settings
from dsx.tracking.events import read_events

PAPER_RATIO = 390.0
"""Seconds of communication per second of computing, of the all-reduce that DiLoCoX is compared
with: 107B parameters over 1 Gbit/s."""

_PROBE_STEPS = 20
"""Of all-reduce, to count what it sends in one."""
_PROBE_FASTER = 8.0
"""Than the wanted rate, roughly: at this one a few steps show how long all-reduce really takes to
send that, without waiting for minutes."""


@dataclass(frozen=True)
class LinkBench:
    """What is compared.

    Args:
        deepspeed_config: a settings file.
        overrides: as for `load_settings`.
        clusters: each of `dsx.pipeline.stages` ranks.
        rate: of each cluster's line, bits per second and direction; None: the rate at which
            all-reduce communicates `PAPER_RATIO` times as long as it computes.
        methods: names of `dsx.bench.link.methods`.
        diloco_steps: H of the `diloco-*` methods.
        repeats: of everything; methods take turns.
        with_loss: train every method to the end of `dsx.training.steps`. Where the link doesn't
            change what is computed, that happens on a link that is not shaped.
        folder: where run folders are kept; None: in a temporary one, which a failure leaves.
    """

    deepspeed_config: str | Path
    overrides: Sequence[str] = ()
    clusters: int = 2
    rate: float | None = None
    methods: Sequence[str] = ("allreduce", "diloco-fp32", "diloco-fp16", "dsx")
    diloco_steps: int = 125
    repeats: int = 1
    with_loss: bool = True
    folder: Path | None = None


def run_link_bench(bench: LinkBench, tell: Callable[[str], None] = lambda text: None) -> Any:
    """Measure.

    Args:
        tell: gets a line about each run.

    Returns:
        a dict with `rows`, one per repeat and method (`dsx.bench.link.rows.measure` tells most
        keys). Besides these: `rate`, bits per second; `utilization`, tokens per second over those
        of `none` (their mean, where it was measured again); `over_allreduce`, the same over
        `allreduce` (None without it); `loss_from`: "this run", or "unshaped link"; `machine`.

    Raises:
        SettingsError: the settings or a method's name are wrong.
        LaunchError: a cluster failed, or the link can't be made.
        Stopped: a signal asked for the end.
    """
    settings = load_settings(bench.deepspeed_config, bench.overrides)
    methods = build_methods(bench.methods, settings, bench.diloco_steps)
    for method in methods:
        own = [Implied(override, f"--methods {method.name}") for override in method.overrides]
        load_settings(bench.deepspeed_config, [*bench.overrides, *own])
    from dsx.training.preflight import preflight

    with _folder(bench.folder) as folder:
        overrides = [*bench.overrides, f"dsx.run_dir={folder}"]
        settings = load_settings(bench.deepspeed_config, overrides)
        ready = preflight(settings, settings.dsx.pipeline.stages)
        # Between clusters that are not on loopback addresses, nothing goes without one.
        secret = folder / "run-secret"
        secret.unlink(missing_ok=True)
        RunSecret.create(secret)
        with SlowLink(bench.clusters) as link, _coordinator(link, secret):
            runs = _Runs(bench, settings, link, folder, tell)
            rows = [row for repeat in range(bench.repeats) for row in _round(runs, methods, repeat)]
    return {
        "rows": rows,
        "clusters": bench.clusters,
        "stages": settings.dsx.pipeline.stages,
        "model_size": ready.model_size,
        "machine": this_machine(),
    }


def _round(runs: "_Runs", methods: Sequence[Method], repeat: int) -> list[dict[str, Any]]:
    """Every method once."""
    rows: list[dict[str, Any]] = []
    for method in methods:
        if method.name != NONE and runs.rate is None:
            runs.rate = _paper_rate(runs, rows[0])
        rate = None if method.name == NONE else runs.rate
        row = runs.one(method, rate, method.speed_steps)
        row |= {"repeat": repeat, "loss_from": "this run"}
        if method.speed_steps is not None:
            # What computes the same on any link is brought to its end where that is quick.
            full = None
            if runs.bench.with_loss and method.name != NONE:
                full = runs.one(method, None, None)
            row["loss"] = full["loss"] if full is not None else None
            row["loss_from"] = "unshaped link" if full is not None else None
        rows.append(row)
    alone = statistics.mean(r["tokens_per_second"] for r in rows if r["method"] == NONE)
    allreduce_speed = [r["tokens_per_second"] for r in rows if r["method"] == "allreduce"]
    for row in rows:
        speed = row["tokens_per_second"]
        row["utilization"] = speed / alone
        row["over_allreduce"] = speed / allreduce_speed[0] if allreduce_speed else None
    return rows


def _paper_rate(runs: "_Runs", none: dict[str, Any]) -> float:
    """Bits per second at which all-reduce communicates `PAPER_RATIO` times as long as computing a
    step takes. `none`: the row of clusters alone."""
    allreduce = build_method("allreduce", runs.settings, runs.bench.diloco_steps)
    counted = runs.one(allreduce, None, _PROBE_STEPS)
    tokens = counted["tokens"] / counted["steps"]
    computing = tokens / none["tokens_per_second"]
    rate = _PROBE_FASTER * 8 * counted["sent_bytes_per_step"] / (PAPER_RATIO * computing)
    timed = runs.one(allreduce, rate, allreduce.speed_steps)
    communicating = tokens / timed["tokens_per_second"] - computing
    return float(rate * communicating / (PAPER_RATIO * computing))


@dataclass
class _Runs:
    """Starts one run after the other on the same link."""

    bench: LinkBench
    settings: Settings
    link: SlowLink
    folder: Path
    tell: Callable[[str], None]
    rate: float | None = field(init=False)
    _made: int = 0

    def __post_init__(self) -> None:
        self.rate = self.bench.rate

    def one(self, method: Method, rate: float | None, steps: int | None) -> dict[str, Any]:
        """A run of `method` at `rate` (None: not shaped), of `steps` steps (None: all)."""
        self._made += 1
        run_dir = str(self.folder / f"{self._made}-{method.name}")
        clusters, stages = self.bench.clusters, self.settings.dsx.pipeline.stages
        overrides = run_overrides(method, steps, clusters, run_dir)
        words = ["--deepspeed_config", str(self.bench.deepspeed_config)]
        words += [part for each in (*self.bench.overrides, *overrides) for part in ("--set", each)]
        checked = [*words, "--checked", "--secret-file", str(self.folder / "run-secret")]
        serving: AbstractContextManager[None] = nullcontext()
        if method.torchft:
            launches = torchft_clusters(self.link, clusters, words, run_dir)
            serving = _lighthouse(self.link, clusters)
        elif method.one_job:
            launches = one_job(self.link, clusters, stages, checked, run_dir)
        else:
            meeting = coordinator_url(self.link) if method.exchanges else None
            launches = separate_clusters(self.link, clusters, stages, checked, run_dir, meeting)
        self.link.shape(rate)
        shaped = f"{rate / 1e6:.3f} Mbit/s" if rate is not None else "not shaped"
        self.tell(f"{method.name}: {'all' if steps is None else steps} steps, link {shaped}")
        watch = Watch(self.link)
        started = time.time()
        with serving:
            run_clusters(launches, watch)
        row = measure(method.name, read_events(run_dir), started, watch, clusters)
        return {**row, "rate": rate}


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="dsx-bench-"))
    yield folder
    shutil.rmtree(folder)


def _coordinator(link: SlowLink, secret: Path) -> AbstractContextManager[None]:
    """`dsx coordinator` at the hub."""
    bind = f"{link.hub_address}:{COORDINATOR_PORT}"
    words = ["coordinator", "--bind", bind, "--secret-file", str(secret)]
    return _serving(link, [sys.executable, "-m", "dsx.cli.main", *words])


def _lighthouse(link: SlowLink, clusters: int) -> AbstractContextManager[None]:
    """torchft's own meeting point at the hub."""
    command = str(Path(sys.executable).parent / "torchft_lighthouse")
    bind = f"{link.hub_address}:{LIGHTHOUSE_PORT}"
    return _serving(link, [command, "--bind", bind, "--min_replicas", str(clusters)])


@contextmanager
def _serving(link: SlowLink, command: Sequence[str]) -> Iterator[None]:
    process = subprocess.Popen(
        [*link.inside(None), *command],
        env={"RUST_LOG": "warn", **os.environ, **link.environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
