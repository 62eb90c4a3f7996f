"""The figure of docs/scale.md."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsx.planning.plan import Plan
from dsx.planning.scale import Point

_COLOURS = {"dsx": "C0", "dilocox": "C2", "opendiloco": "C1", "allreduce": "C3"}
_ENDS = {2: "-", 64: "--"}
_FEW = (2, 8, 64)


def draw(points: Sequence[Point], path: Path) -> None:
    """Above: utilization against the link's rate, by method; below: dsx over all-reduce."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        by_name.setdefault(point.scenario.name, []).append(point)
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.subplots(2, len(by_name), sharex=True, sharey="row", squeeze=False)
    for column, own in enumerate(by_name.values()):
        scenario = own[0].scenario
        top, bottom = grid[0][column], grid[1][column]
        top.set_title(f"{scenario.name}\n{scenario.gpus} {scenario.gpu.name} a cluster", fontsize=9)
        _utilization(top, own)
        _speedup(bottom, own)
        bottom.set_xlabel("link of each cluster, Gbit/s")
    grid[0][0].set_ylabel("utilization (1: as without an exchange)")
    grid[1][0].set_ylabel("tokens/s over all-reduce")
    grid[1][0].legend(fontsize=7, frameon=False)
    methods = grid[0][0].get_legend_handles_labels()
    figure.legend(*methods, loc="outside lower center", ncols=len(_COLOURS), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _utilization(axes: Axes, points: Sequence[Point]) -> None:
    for method, colour in _COLOURS.items():
        for clusters, style in _ENDS.items():
            label = f"{method}, {clusters} clusters"
            xs, ys = _line(points, clusters, partial(_utilization_of, method))
            axes.plot(xs, ys, style, color=colour, label=label, marker=".")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)


def _speedup(axes: Axes, points: Sequence[Point]) -> None:
    for number, clusters in enumerate(_FEW):
        xs, ys = _line(points, clusters, lambda p: p.speedup("allreduce"))
        axes.plot(xs, ys, color=f"C{4 + number}", label=f"{clusters} clusters", marker=".")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _utilization_of(method: str, plan: Plan) -> float:
    return next(each for each in plan.methods if each.method == method).utilization


def _line(
    points: Sequence[Point], clusters: int, value: Callable[[Plan], float]
) -> tuple[list[float], list[float]]:
    chosen = [p for p in points if p.clusters == clusters and p.plan is not None]
    return [p.rate / 1e9 for p in chosen], [value(p.plan) for p in chosen if p.plan is not None]
