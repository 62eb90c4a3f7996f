"""What `dsx simulate` shows: a table for people, a JSON object for programs."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from dsx.simulation.compare import Row
from dsx.simulation.link import Link
from dsx.simulation.result import RunResult
from dsx.tracking.text import bytes_text, number_text, seconds_text


def table(rows: Sequence[Row], link: Link | None, step_seconds: float) -> Table:
    """One line per choice of settings; means over the seeds."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("run", overflow="fold")
    columns = ["seeds", "loss", "+-", "kept", "least kept", "sent per step", "fewer bytes"]
    for column in [*columns, *(["on the link"] if link else [])]:
        out.add_column(column, justify="right")
    for row in rows:
        first = row.runs[0][1]
        fewer = first.fewer_bytes
        cells = [
            row.name + (" (compared with)" if row.best else ""),
            str(len(row.runs)),
            number_text(row.loss),
            number_text(row.loss_deviation),
            number_text(row.kept_mean, digits=2),
            number_text(min(row.kept, default=None), digits=2),
            bytes_text(first.bytes_per_step),
            "-" if fewer is None else f"{fewer:,.0f}x",
        ]
        if link is not None:
            cells.append(seconds_text(link.run_seconds(first, step_seconds, first.steps)))
        out.add_row(*cells)
    return out


def as_json(rows: Sequence[Row], link: Link | None, step_seconds: float) -> dict[str, Any]:
    """Every run by itself; `kept` is null without both baselines for its seed.

    `settings` holds what differs from the file, by full key.
    """
    return {
        "runs": [
            {
                "name": spec.name,
                "settings": {k: v for k, v in spec.changed.items() if k != "dsx.seed"},
                "seed": result.seed,
                "compared_with": row.best,
                "kept": row.kept[index] if row.kept else None,
                **result.model_dump(mode="json", exclude={"kind", "seed", "curve"}),
                "link_seconds": _seconds(result, link, step_seconds, result.steps),
                "curve": [
                    {
                        **point.model_dump(),
                        "link_seconds": _seconds(result, link, step_seconds, point.step),
                    }
                    for point in result.curve
                ],
            }
            for row in rows
            for index, (spec, result) in enumerate(row.runs)
        ]
    }


def _seconds(result: RunResult, link: Link | None, step_seconds: float, steps: int) -> float | None:
    return None if link is None else link.run_seconds(result, step_seconds, steps)
