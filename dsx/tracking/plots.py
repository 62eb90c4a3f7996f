"""The plots of a report. Each takes all runs and returns a figure, or None without data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dsx.tracking.events import (
    EvalEvent,
    Event,
    InnerEvent,
    OuterEvent,
    RunEvent,
    latest_by_step,
    of_kind,
)
from dsx.tracking.places import Place, busy_shares, places
from dsx.tracking.summary import FP32_BYTES, compute_seconds, split_by_cluster
from dsx.tracking.svg import FAINT, INK, STYLE, series_colour
from dsx.tracking.text import count_text

MAX_POINTS = 1500
WIDTH = 7.2
_MAX_BARS = 60


@dataclass(frozen=True)
class RunData:
    """A run as the plots need it."""

    label: str
    events: Sequence[Event]

    def clusters(self, several_runs: bool) -> Iterator[tuple[str, list[Event]]]:
        """Label and events of each cluster; the run's name is part of it beside other runs."""
        for cluster, events in split_by_cluster(self.events).items():
            yield (f"{self.label}: {cluster}" if several_runs else f"cluster {cluster}"), events


def loss_over_tokens(runs: Sequence[RunData]) -> Figure | None:
    """Losses over the tokens that each cluster has trained on."""
    return _losses(runs, "tokens", lambda place: place.tokens, "tokens of a cluster", "")


def loss_over_bytes(runs: Sequence[RunData]) -> Figure | None:
    """Losses over the bytes that each cluster has sent to others; None where nothing was sent."""
    if not any(event.bytes_sent for run in runs for event in of_kind(run.events, OuterEvent)):
        return None
    return _losses(runs, "bytes sent", lambda place: place.bytes, "sent by a cluster", "B")


def loss_over_time(runs: Sequence[RunData]) -> Figure | None:
    """Losses over the time that each cluster has run, without the gaps between its starts."""
    seconds = max(
        (place.seconds for _, (_, _, events) in _numbered(runs) for _, place in places(events)),
        default=0.0,
    )
    unit, label = time_unit(seconds)
    return _losses(runs, "time", lambda place: place.seconds / unit, label, None)


def _losses(
    runs: Sequence[RunData],
    over: str,
    x_of: Callable[[Place], float],
    x_label: str,
    x_unit: str | None,
) -> Figure | None:
    """Training loss of each cluster and held-out loss of the shared weights."""
    figure, axes = new_figure()
    drawn = 0
    for index, (_, label, events) in _numbered(runs):
        steps = {
            event.step: (x_of(place), event.loss)
            for event, place in places(events)
            if isinstance(event, InnerEvent)
        }
        if steps:
            points = [steps[step] for step in sorted(steps)]
            x, y = _thin([x for x, _ in points], [loss for _, loss in points])
            axes.plot(x, y, color=series_colour(index), alpha=0.85, label=label)
            drawn += 1
    for number, run in enumerate(runs):
        x, y = _shared_evaluations(run, x_of)
        if x:
            label = "shared, held out" if len(runs) == 1 else f"{run.label}: shared, held out"
            axes.plot(
                x,
                y,
                color=INK,
                marker="osD^v"[number % 5],
                linestyle=("-", "--", "-.", ":")[number % 4],
                markersize=4,
                linewidth=1,
                label=label,
            )
            drawn += 1
    if not drawn:
        return None
    title = f"Loss over {over}"
    return finish(figure, axes, title, x_label, "nats per token", x_unit=x_unit)


def bytes_over_steps(runs: Sequence[RunData]) -> Figure | None:
    """Bytes sent by each cluster, summed up, and what per-step fp32 all-reduce would have sent."""
    figure, axes = new_figure()
    last_steps: dict[int, int] = {}
    """Parameters -> inner steps: runs of one model size share the line to compare with."""
    drawn = 0
    for index, (run, label, events) in _numbered(runs):
        points = [(p.step, p.bytes) for e, p in places(events) if isinstance(e, OuterEvent)]
        if not points or points[-1][1] == 0:
            continue
        x, y = zip(*points, strict=True)
        axes.step(x, y, where="post", color=series_colour(index), label=label)
        drawn += 1
        size = _parameters(run)
        if size is not None:
            last_steps[size] = max(last_steps.get(size, 0), x[-1])
    if not drawn:
        return None
    for size, last in last_steps.items():
        label = "per-step fp32 all-reduce"
        axes.plot(
            [1, last],
            [FP32_BYTES * size, FP32_BYTES * size * last],
            color=INK,
            linestyle="--",
            linewidth=1,
            label=label if len(last_steps) == 1 else f"{label}, {count_text(size)} parameters",
        )
    axes.set_yscale("log")
    return finish(
        figure, axes, "Bytes a cluster has sent", "inner step", "bytes", x_unit=None, y_unit="B"
    )


def seconds_per_round(run: RunData, title: str) -> Figure | None:
    """Per round, mean over clusters: inner compute, time blocked, and the exchange beside them."""
    phases = _phase_seconds(run)
    if not phases:
        return None
    rounds = sorted(phases)
    width = max(1, -(-len(rounds) // _MAX_BARS))
    groups = [rounds[at : at + width] for at in range(0, len(rounds), width)]
    inner, blocked, exchange = (
        np.array([np.mean([phases[r][phase] for r in group]) for group in groups])
        for phase in range(3)
    )
    figure, axes = new_figure()
    left = np.array([group[0] for group in groups], dtype=float)
    bar = 0.4 * width
    axes.bar(left, inner, bar, color=series_colour(0), label="inner compute")
    axes.bar(left, blocked, bar, bottom=inner, color=series_colour(1), label="blocked")
    axes.bar(left + bar, exchange, bar, color=series_colour(2), label="exchange, beside them")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if width > 1:
        title += f", means over {width} rounds"
    return finish(figure, axes, title, "round", "seconds", x_unit=None)


def tokens_per_second(runs: Sequence[RunData]) -> Figure | None:
    """Throughput of each cluster."""
    figure, axes = new_figure()
    drawn = 0
    for index, (_, label, events) in _numbered(runs):
        steps = latest_by_step(events)
        if steps:
            x, y = _thin([s.step for s in steps], [s.tokens_per_second for s in steps])
            axes.plot(x, y, color=series_colour(index), label=label)
            drawn += 1
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    return finish(figure, axes, "Throughput", "inner step", "tokens per second", x_unit=None)


def utilization(runs: Sequence[RunData]) -> Figure | None:
    """The share of its time that each cluster spends in inner steps."""
    figure, axes = new_figure()
    drawn = 0
    for index, (_, label, events) in _numbered(runs):
        shares = busy_shares(events)
        if shares:
            x, y = _thin([step for step, _ in shares], [100 * share for _, share in shares])
            marker = "o" if len(x) < 30 else None  # one stretch alone is no line
            axes.plot(x, y, color=series_colour(index), marker=marker, markersize=4, label=label)
            drawn += 1
    if not drawn:
        return None
    axes.set_ylim(0, 103)
    return finish(figure, axes, "Compute utilization", "inner step", "%", x_unit=None)


def new_figure(height: float = 3.6, width: float = WIDTH) -> tuple[Figure, Any]:
    """A figure with one pair of axes; sizes in inches, at 100 pixels each."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()


def finish(
    figure: Figure,
    axes: Any,
    title: str,
    x_label: str,
    y_label: str,
    *,
    x_unit: str | None,
    y_unit: str | None = None,
    handles: Sequence[Any] | None = None,
) -> Figure:
    """Title, axes and legend; a unit None leaves an axis with plain numbers.

    `handles`: of the legend; by default what was labelled.
    """
    with rc_context(STYLE):
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if x_unit is not None:
            axes.xaxis.set_major_formatter(EngFormatter(unit=x_unit))
        if y_unit is not None:
            axes.yaxis.set_major_formatter(EngFormatter(unit=y_unit))
        axes.tick_params(color=FAINT)
        entries = axes.get_legend_handles_labels()[0] if handles is None else handles
        if entries:
            columns = min(round(4 * figure.get_figwidth() / WIDTH), len(entries))
            figure.legend(handles=entries, fontsize=8, ncols=columns, loc="outside lower center")
    return figure


def _numbered(
    runs: Sequence[RunData],
) -> Iterator[tuple[int, tuple[RunData, str, list[Event]]]]:
    return enumerate(
        (run, label, events) for run in runs for label, events in run.clusters(len(runs) > 1)
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which a stretch of time is read easily."""
    units = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (96 * 3600.0, 3600.0, "hours"))
    return next(((unit, name) for most, unit, name in units if seconds < most), (86400.0, "days"))


def _thin(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """At most MAX_POINTS points: means over equal stretches."""
    stretch = -(-len(x) // MAX_POINTS)
    if stretch <= 1:
        return x, y
    starts = np.arange(0, len(x), stretch)
    counts = np.diff(np.append(starts, len(x)))
    return (
        list(np.add.reduceat(np.asarray(x, dtype=float), starts) / counts),
        list(np.add.reduceat(np.asarray(y, dtype=float), starts) / counts),
    )


def _shared_evaluations(
    run: RunData, x_of: Callable[[Place], float]
) -> tuple[list[float], list[float]]:
    """Held-out losses of the shared weights, placed where the cluster that measured them was."""
    found: dict[int, tuple[float, float]] = {}
    for events in split_by_cluster(run.events).values():
        for event, place in places(events):
            if isinstance(event, EvalEvent) and event.weights == "shared":
                # All clusters hold the same shared weights: one point for each round is enough.
                found.setdefault(event.round, (x_of(place), event.loss))
    points = sorted(found.values())
    return [x for x, _ in points], [y for _, y in points]


def _phase_seconds(run: RunData) -> dict[int, tuple[float, float, float]]:
    """round -> seconds of (inner compute, blocked, exchange), means over the clusters."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for events in split_by_cluster(run.events).values():
        steps = latest_by_step(events)
        seconds = compute_seconds(steps)
        rounds = {event.round: event for event in of_kind(events, OuterEvent)}
        start = 0
        # Where rounds overlap, a step's place in time doesn't say which round it belongs to, but
        # rounds have their steps one after the other.
        for number in sorted(rounds):
            event = rounds[number]
            inner = sum(seconds[start : start + event.local_steps])
            start += event.local_steps
            found.setdefault(number, []).append(
                (inner, event.blocked_seconds, event.exchange_seconds)
            )
    return {
        round_: tuple(float(np.mean(phase)) for phase in zip(*values, strict=True))  # type: ignore[misc]
        for round_, values in found.items()
    }


def _parameters(run: RunData) -> int | None:
    starts = of_kind(run.events, RunEvent)
    return starts[-1].model_size if starts else None
