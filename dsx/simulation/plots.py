"""Plots of a sweep: held-out loss over tokens, over bytes, and over time on the modelled link."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dsx.simulation.compare import Row
from dsx.simulation.link import Link
from dsx.simulation.result import Point, RunResult

_COLOURS = 10


def write_plots(
    rows: Sequence[Row], folder: Path, link: Link | None, step_seconds: float
) -> list[Path]:
    """Write `loss-over-*.svg` into `folder`; each line is the first seed of a row.

    Returns:
        the files written.
    """

    def on_link(result: RunResult, point: Point) -> float:
        assert link is not None
        return link.run_seconds(result, step_seconds, point.step)

    axes: list[tuple[str, str, str, bool, Callable[[RunResult, Point], float]]] = [
        ("tokens", "tokens of all clusters", "", False, lambda _, point: point.tokens),
        ("bytes", "bytes a cluster has sent", "B", True, lambda _, point: point.bytes),
    ]
    if link is not None:
        axes.append(("time", "seconds on the modelled link", "s", False, on_link))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, label, unit, logarithmic, position in axes:
        figure = _draw(rows, label, unit, logarithmic, position)
        path = folder / f"loss-over-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


def _draw(
    rows: Sequence[Row],
    label: str,
    unit: str,
    logarithmic: bool,
    position: Callable[[RunResult, Point], float],
) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row.best or row.runs[0][0].kind == "clusters"]
    for number, row in enumerate(shown):
        result = row.runs[0][1]
        points = [(position(result, point), point.loss) for point in result.curve]
        # Nothing is sent by a cluster alone, and a logarithm has no place for it.
        points = [(x, y) for x, y in points if x > 0 or not logarithmic]
        if not points:
            continue
        baseline = result.kind != "clusters"
        axes.plot(
            *zip(*points, strict=True),
            label=row.name,
            color="black" if baseline else f"C{number % _COLOURS}",
            linestyle=":" if result.kind == "single" else "--" if baseline else "-",
            marker="." if len(points) < 30 else None,
        )
    if logarithmic:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
    return figure
