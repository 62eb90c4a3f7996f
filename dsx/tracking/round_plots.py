"""What changes from round to round: inner steps, rank, bytes, and the time of the exchange."""

from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from dsx.tracking.events import OuterEvent, of_kind
from dsx.tracking.plots import RunData
from dsx.tracking.svg import FAINT, STYLE, series_colour

_PANELS: tuple[tuple[str, str | None, Callable[[OuterEvent], float]], ...] = (
    ("inner steps (H)", None, lambda event: event.local_steps),
    ("rank", None, lambda event: event.rank),
    ("bytes sent", "B", lambda event: event.bytes_sent),
    ("exchange, seconds", None, lambda event: event.exchange_seconds),
)


def adaptation_over_rounds(runs: Sequence[RunData]) -> Figure | None:
    """A small plot of each, over rounds, a line for each cluster; rank where there is one."""
    series: list[tuple[str, list[OuterEvent]]] = []
    for run in runs:
        for label, events in run.clusters(len(runs) > 1):
            # A round that was repeated after a resume counts as it was last made.
            rounds = {event.round: event for event in of_kind(events, OuterEvent)}
            if rounds:
                series.append((label, [rounds[number] for number in sorted(rounds)]))
    if not series:
        return None
    ranked = any(event.rank for _, made in series for event in made)
    panels = [panel for panel in _PANELS if ranked or panel[0] != "rank"]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.3 * len(panels) + 0.8), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True)
        for axes, (title, unit, value) in zip(all_axes, panels, strict=True):
            for index, (label, made) in enumerate(series):
                x = [event.round for event in made]
                y = [value(event) for event in made]
                axes.step(x, y, where="mid", color=series_colour(index), label=label)
            axes.set_ylim(bottom=0)
            axes.set_title(title, fontsize=9)
            axes.tick_params(color=FAINT)
            if unit is not None:
                axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
        all_axes[-1].set_xlabel("round")
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        handles, labels = all_axes[0].get_legend_handles_labels()
        columns = min(4, len(labels))
        figure.legend(handles, labels, fontsize=8, ncols=columns, loc="outside lower center")
    return figure
