"""One display for all clusters of a run, fed by what they write: metrics files and logs."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dsx.errors import TrackingError
from dsx.tracking.events import EvalEvent, InnerEvent, metrics_path, parse_line
from dsx.tracking.phases import phase_in
from dsx.tracking.tail import Tail
from dsx.tracking.text import count_text, number_text, seconds_text

PLAIN_SECONDS = 5.0
"""Time between lines where the output is not a terminal."""
QUIET_SECONDS = 30.0
"""The same while nothing changes."""
WIDE = 110
"""Columns of a terminal that has room for bars."""
RECENT_STEPS = 20
"""By which `slowest_step` goes."""


def log_path(run_dir: Path | str, cluster: str) -> Path:
    """Where the output of a cluster's processes goes."""
    return Path(run_dir) / "logs" / f"{cluster}.log"


@dataclass
class ClusterProgress:
    """What is known of one cluster."""

    name: str
    phase: str = "starting"
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    shared_eval_loss: float | None = None
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """From step to step, with all that falls between them."""

    def numbers(self, width: int | None = None) -> str:
        """Loss, speed and held-out loss, as far as known and as they fit beside a phase."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {number_text(self.loss, digits=3)}")
        if self.tokens_per_second is not None:
            parts.append(f"{count_text(self.tokens_per_second)} tok/s")
        if self.shared_eval_loss is not None and (width is None or width >= WIDE):
            parts.append(f"held-out {number_text(self.shared_eval_loss, digits=3)}")
        return "  ".join(parts)


class ClusterFeed:
    """Follows a cluster's metrics file and log from the moment it is made."""

    def __init__(self, run_dir: Path | str, cluster: str) -> None:
        self.state = ClusterProgress(cluster)
        self._metrics = Tail(metrics_path(run_dir, cluster))
        self._log = Tail(log_path(run_dir, cluster))
        self._last_step_at: float | None = None

    def poll(self) -> ClusterProgress:
        """The state after everything that was written up to now."""
        for line in self._log.new_lines():
            self.state.phase = phase_in(line) or self.state.phase
        for line in self._metrics.new_lines():
            try:
                event = parse_line(line, "line")
            except TrackingError:
                continue  # The end of a line that a killed process had begun.
            if isinstance(event, InnerEvent):
                if event.step != self.state.step:
                    self.state.phase = "training"
                if self._last_step_at is not None:
                    self.state.step_seconds.append(event.time - self._last_step_at)
                self._last_step_at = event.time
                self.state.step = event.step
                self.state.loss = event.loss
                self.state.tokens_per_second = event.tokens_per_second
            elif isinstance(event, EvalEvent) and event.weights == "shared":
                self.state.shared_eval_loss = event.loss
        return self.state


class RunProgress:
    """The display: a bar for each cluster on a terminal, elsewhere a line every few seconds.

    A context manager; call `update` several times a second inside it. Make it before the clusters
    start, since it follows their files from their present ends.

    Args:
        run_dir: the run's folder.
        clusters: their names.
        steps: inner steps of the whole run.
        console: where to show it; the standard error output by default.
        clock: seconds, for the time between plain lines.
    """

    def __init__(
        self,
        run_dir: Path | str,
        clusters: Sequence[str],
        steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._steps = steps
        self._feeds = [ClusterFeed(run_dir, cluster) for cluster in clusters]
        self._started = clock()
        self._last_line = ""
        self._printed_at = float("-inf")
        self._bars: Progress | None = None
        self._tasks: list[TaskID] = []

    @property
    def states(self) -> list[ClusterProgress]:
        return [feed.state for feed in self._feeds]

    def __enter__(self) -> "RunProgress":
        if self._console.is_terminal:
            # On a narrow terminal the numbers matter more than the bar.
            bar = [BarColumn(bar_width=24)] if self._console.width >= WIDE else []
            self._bars = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                TextColumn("{task.fields[phase]}", markup=False),
                *bar,
                TextColumn("{task.completed:.0f}/{task.fields[steps]}"),
                TextColumn("{task.fields[numbers]}", style="cyan", markup=False),
                TextColumn("{task.fields[elapsed]}", style="dim"),
                console=self._console,
            )
            self._tasks = [
                self._bars.add_task(
                    feed.state.name,
                    total=self._steps or None,
                    phase="",
                    numbers="",
                    elapsed="",
                    steps=self._steps,
                )
                for feed in self._feeds
            ]
            self._bars.start()
        self.update()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.update(last=True)
        if self._bars is not None:
            self._bars.stop()

    def set_phase(self, cluster: str, phase: str) -> None:
        """Say something about a cluster that it can't say itself, such as that it has ended."""
        for feed in self._feeds:
            if feed.state.name == cluster:
                feed.poll()  # What it said itself came before.
                feed.state.phase = phase

    def tell(self, text: str) -> None:
        """A line for the person, beside what is shown of the clusters."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def slowest_step(self) -> float:
        """Seconds from step to step, of the slowest of late of any cluster; 0: none known."""
        return max((max(state.step_seconds, default=0.0) for state in self.states), default=0.0)

    def update(self, *, last: bool = False) -> None:
        """Read what is new and show it; `last` shows it whatever was shown a moment ago."""
        for feed in self._feeds:
            feed.poll()
        if self._bars is None:
            self._print_line(last)
            return
        for task, state in zip(self._tasks, self.states, strict=True):
            self._bars.update(
                task,
                completed=state.step,
                phase=state.phase,
                numbers=state.numbers(self._console.width),
                elapsed=self._elapsed(),
            )

    def _elapsed(self) -> str:
        return seconds_text(round(self._clock() - self._started), digits=0)

    def _print_line(self, last: bool) -> None:
        now = self._clock()
        line = " | ".join(self._describe(state) for state in self.states)
        news = line != self._last_line
        since = now - self._printed_at
        if (news and last) or since >= (PLAIN_SECONDS if news else QUIET_SECONDS):
            self._console.print(
                f"{self._elapsed()}: {line}", markup=False, highlight=False, soft_wrap=True
            )
            self._last_line = line
            self._printed_at = now

    def _describe(self, state: ClusterProgress) -> str:
        steps = f"{state.step}/{self._steps}" if state.step else ""
        return "  ".join(part for part in (state.name, state.phase, steps, state.numbers()) if part)
