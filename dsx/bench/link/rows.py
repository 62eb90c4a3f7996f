"""What one run on a slow link comes down to, from the lines that its clusters have written.

The first rounds and steps are slower than the rest (connections, caches, rules that have not
settled), so speeds and bytes are those of the last two thirds of the time between the first and the
last mark. A mark is the end of a round, or of a step where there are no rounds: whole rounds count,
with all their waiting.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx.bench.link.watch import Watch
from dsx.errors import LaunchError
from dsx.tracking.events import EvalEvent, Event, InnerEvent, OuterEvent, latest_by_step, of_kind
from dsx.tracking.summary import split_by_cluster

_LEFT_OUT = 1 / 3


@dataclass(frozen=True)
class Window:
    """The measured part of one cluster's run."""

    mark: InnerEvent
    """The step at whose end it begins."""
    end: float
    """`time.time()`, as `start`."""
    steps: tuple[InnerEvent, ...]
    """Made in it; at least one."""
    rounds: tuple[OuterEvent, ...]
    """Whose averages were applied in it."""
    tokens: int
    """Trained in it."""

    @property
    def start(self) -> float:
        return self.mark.time


def measure(
    method: str, events: Sequence[Event], started: float, watch: Watch, clusters: int
) -> dict[str, Any]:
    """The row of a run, but for what needs other rows.

    Args:
        events: of all clusters (one, where one job spans them).
        started: when the launches were started, `time.time()`.

    Raises:
        LaunchError: the run was too short to measure.
    """
    by_cluster = split_by_cluster(events)
    windows = _windows(method, by_cluster)
    seconds = [window.end - window.start for window in windows]
    tokens = [window.tokens for window in windows]
    # One job's batches are those of all clusters; what it sends is counted at each of them.
    shares = tokens if len(windows) == clusters else [tokens[0] / clusters] * clusters
    spans = windows if len(windows) == clusters else windows * clusters
    sent = [watch.sent(c, span.start, span.end) for c, span in enumerate(spans)]
    received = [watch.received(c, span.start, span.end) for c, span in enumerate(spans)]
    steps = [step for window in windows for step in window.steps]
    rounds = [round_ for window in windows for round_ in window.rounds]
    ends = [own[-1].time for own in by_cluster.values()]
    first = min(latest_by_step(own)[0].time for own in by_cluster.values())
    return {
        "method": method,
        "tokens_per_second": sum(t / s for t, s in zip(tokens, seconds, strict=True)),
        "sent_bytes_per_token": sum(sent) / sum(shares),
        "received_bytes_per_token": sum(received) / sum(shares),
        "sent_bytes_per_step": sum(sent) / len(steps) / (clusters // len(windows)),
        "step_seconds": statistics.median(_step_seconds(windows)),
        "exchange_seconds": _median([round_.exchange_seconds for round_ in rounds]),
        "blocked_seconds": _median([round_.blocked_seconds for round_ in rounds]),
        "local_steps": rounds[-1].local_steps if rounds else None,
        "delay": rounds[-1].delay if rounds else None,
        "measured_steps": len(windows[0].steps),
        "measured_rounds": len(windows[0].rounds),
        "measured_seconds": statistics.mean(seconds),
        "start_seconds": first - started,
        "run_seconds": max(ends) - first,
        "tokens": _tokens(by_cluster),
        "steps": latest_by_step(next(iter(by_cluster.values())))[-1].step,
        "loss": _loss(events),
        "peak_rank_bytes": dict(sorted(watch.peaks.items())),
    }


def _windows(method: str, by_cluster: Mapping[str, Sequence[Event]]) -> list[Window]:
    marks = {cluster: _marks(events) for cluster, events in by_cluster.items()}
    # The same steps of all clusters: they pass a mark at about the same time.
    last = min(len(own) for own in marks.values()) - 1
    first = max((_settled([mark.time for mark in own]) for own in marks.values()), default=0)
    if last <= first:
        raise LaunchError(
            f"the run of {method} was too short to measure: no whole round lies in the last two "
            "thirds of it; raise dsx.training.steps"
        )
    windows = []
    for cluster, events in by_cluster.items():
        start, end = marks[cluster][first], marks[cluster][last]
        windows.append(
            Window(
                start,
                end.time,
                tuple(s for s in latest_by_step(events) if start.step < s.step <= end.step),
                tuple(r for r in of_kind(events, OuterEvent) if start.time < r.time <= end.time),
                end.tokens - start.tokens,
            )
        )
    return windows


def _settled(times: Sequence[float]) -> int:
    """The first mark after the part that is left out."""
    if not times:
        return 0
    begin = times[0] + _LEFT_OUT * (times[-1] - times[0])
    return next(index for index, moment in enumerate(times) if moment >= begin)


def _marks(events: Sequence[Event]) -> list[InnerEvent]:
    """The last inner step of every round, or all steps where there are no rounds."""
    steps = latest_by_step(events)
    rounds = of_kind(events, OuterEvent)
    if not rounds:
        return steps
    lengths = [round_.local_steps for round_ in rounds]
    if len(lengths) > 1 and lengths[-1] < lengths[-2]:
        lengths.pop()  # cut off by the end of the run
    return [steps[end - 1] for end in itertools.accumulate(lengths)]


def _step_seconds(windows: Sequence[Window]) -> list[float]:
    return [
        (after.tokens - before.tokens) / after.tokens_per_second
        for window in windows
        for before, after in itertools.pairwise((window.mark, *window.steps))
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _tokens(by_cluster: Mapping[str, Sequence[Event]]) -> int:
    return sum(latest_by_step(events)[-1].tokens for events in by_cluster.values())


def _loss(events: Sequence[Event]) -> float | None:
    """Held-out loss at the end, of the shared weights where there are such."""
    evaluations = of_kind(events, EvalEvent)
    return evaluations[-1].loss if evaluations else None
