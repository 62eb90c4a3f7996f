"""A run's summary on a terminal."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsx.tracking.summary import RunSummary
from dsx.tracking.text import bytes_text, count_text, number_text, seconds_text


def print_summary(run_dir: Path | str, console: Console | None = None) -> RunSummary:
    """Print what a run came to on the standard output (or `console`), and return it.

    Raises `TrackingError` when the folder holds no metrics.
    """
    summary = RunSummary.from_run(run_dir)
    out = console or Console()
    out.print(_clusters(summary))
    out.print(_totals(summary))
    return summary


def _clusters(summary: RunSummary) -> Table:
    table = Table(title=Text(summary.name), title_justify="left", title_style="bold")
    table.add_column("cluster", overflow="fold")
    for heading in ("steps", "first loss", "last loss", "tokens", "sent", "blocked"):
        table.add_column(heading, justify="right", overflow="fold")
    for cluster in summary.clusters:
        table.add_row(
            Text(cluster.name),
            str(cluster.steps),
            number_text(cluster.first_loss),
            number_text(cluster.last_loss),
            count_text(cluster.tokens),
            bytes_text(cluster.bytes_sent),
            seconds_text(cluster.blocked_seconds),
        )
    return table


def _totals(summary: RunSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in ("what", "how much"):
        grid.add_column(overflow="fold")
    if summary.shared_eval_loss is not None:
        loss = number_text(summary.shared_eval_loss)
        if summary.bits_per_byte is not None:
            loss += f" ({number_text(summary.bits_per_byte)} bits per byte)"
        grid.add_row("held-out loss of the shared weights", loss)
    if summary.all_reduce_bytes is not None:
        fewer = summary.times_fewer_bytes
        sent = bytes_text(summary.bytes_exchanged)
        grid.add_row("sent between clusters", sent)
        grid.add_row(
            "per-step fp32 all-reduce would have sent",
            bytes_text(summary.all_reduce_bytes)
            + (f" ({number_text(fewer, digits=1)} times as much)" if fewer is not None else ""),
        )
    grid.add_row("tokens", count_text(summary.tokens))
    grid.add_row("time in training", seconds_text(summary.seconds))
    return grid
