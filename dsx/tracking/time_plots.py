"""Plots over the clock: what every rank did in a few rounds, and who took part when."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dsx.tracking.events import OuterEvent, PhasesEvent, of_kind
from dsx.tracking.plots import WIDTH, RunData, finish, new_figure, time_unit
from dsx.tracking.svg import STYLE, series_colour

# Of what stands still in the training thread nothing may be overlooked: it has the loudest colour.
_IN_FRONT = {"inner steps": 0, "wait": 1, "outer step": 3, "save": 7, "evaluate": 5}
_BESIDE = {"exchange": 2, "encode": 4, "write": 7}
"""Phases of threads of their own, drawn as a thin bar below: name -> colour. Later ones lie on
earlier ones."""
_NAMES = {
    "wait": "wait for the exchange",
    "save": "save: copy",
    "write": "save: write to disk",
}
_ROW, _FRONT, _BACK = 1.0, 0.5, 0.22
_LEAST = 0.001
"""Of the width, that the shortest phase is given: it must be seen."""


def timeline(run: RunData, title: str) -> Figure | None:
    """The last few rounds whose phases were recorded: a row for each rank of each cluster, above
    what holds up inner steps, below what runs beside them."""
    rows, rounds = _last_window(of_kind(run.events, PhasesEvent))
    if not rows:
        return None
    first = min(start for spans in rows.values() for _, start, _ in spans)
    last = max(start + seconds for spans in rows.values() for _, start, seconds in spans)
    figure, axes = new_figure(1.3 + 0.32 * len(rows), 2 * WIDTH)
    seen: dict[str, int] = {}
    for row, spans in enumerate(rows.values()):
        for lane, at, height in (
            (_IN_FRONT, row - 0.42 * _ROW, _FRONT),
            (_BESIDE, row + 0.14 * _ROW, _BACK),
        ):
            for name, colour in lane.items():
                bars = [
                    (start - first, max(seconds, _LEAST * (last - first)))
                    for phase, start, seconds in spans
                    if phase == name
                ]
                if bars:
                    seen[name] = colour
                    axes.broken_barh(bars, (at, height), color=series_colour(colour), linewidth=0)
    _name_rows(axes, [f"{cluster}, rank {rank}" for cluster, rank in rows])
    axes.set_xlim(0, last - first)
    axes.grid(visible=False, axis="y")
    order = [name for name in (*_IN_FRONT, *_BESIDE) if name in seen]
    handles = [Patch(color=series_colour(seen[n]), label=_NAMES.get(n, n)) for n in order]
    span = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return finish(figure, axes, f"{title}, {span}", "seconds", "", x_unit=None, handles=handles)


def membership(run: RunData, title: str) -> Figure | None:
    """When each cluster's pseudo-gradients were part of the rounds."""
    rounds: dict[int, OuterEvent] = {}
    for event in of_kind(run.events, OuterEvent):
        # Whoever saw its end first; a round that was made again counts as it was last made.
        known = rounds.get(event.round)
        if known is None or known.participants != event.participants or event.time < known.time:
            rounds[event.round] = event
    if not rounds:
        return None
    names = sorted({name for event in rounds.values() for name in event.participants})
    start = min(event.time for event in run.events)
    unit, label = time_unit(max(event.time for event in run.events) - start)
    figure, axes = new_figure(1.3 + 0.3 * len(names))
    for row, name in enumerate(names):
        bars: list[tuple[float, float]] = []
        before = start
        for number in sorted(rounds):
            event = rounds[number]
            begin, end = (before - start) / unit, (event.time - start) / unit
            before = max(before, event.time)
            if name not in event.participants or end <= begin:
                continue
            if bars and abs(sum(bars[-1]) - begin) < 1e-9:
                begin = bars.pop()[0]
            bars.append((begin, end - begin))
        axes.broken_barh(bars, (row - 0.3, 0.6), color=series_colour(row), linewidth=0)
    _name_rows(axes, names)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")
    return finish(figure, axes, title, f"{label} since the first start", "", x_unit=None)


def _name_rows(axes: object, names: Sequence[str]) -> None:
    with rc_context(STYLE):
        axes.set_yticks(range(len(names)), names)  # type: ignore[attr-defined]
        axes.set_ylim(len(names) - 0.4, -0.6)  # type: ignore[attr-defined]


def _last_window(
    events: Sequence[PhasesEvent],
) -> tuple[Mapping[tuple[str, int], list[tuple[str, float, float]]], list[int]]:
    """(cluster, rank) -> its spans in the last rounds in a row that most clusters recorded."""
    recorded: dict[int, set[str]] = {}
    for event in events:
        recorded.setdefault(event.round, set()).add(event.cluster)
    if not recorded:
        return {}, []
    most = max(len(clusters) for clusters in recorded.values())
    window = [max(number for number, who in recorded.items() if len(who) == most)]
    while window[0] - 1 in recorded:
        window.insert(0, window[0] - 1)
    # A round that was made again counts as it was last made.
    latest = {(e.cluster, e.rank, e.round): e for e in events if e.round in window}
    rows: dict[tuple[str, int], list[tuple[str, float, float]]] = {}
    for cluster, rank, number in sorted(latest):
        spans = latest[cluster, rank, number].spans
        rows.setdefault((cluster, rank), []).extend((n, s, d) for n, s, d in spans)
    return rows, window
