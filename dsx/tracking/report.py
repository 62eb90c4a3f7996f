"""`dsx report`: a run, or several side by side, as one HTML page that needs nothing else."""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dsx.errors import TrackingError
from dsx.tracking import page
from dsx.tracking.events import RunEvent, of_kind, read_events
from dsx.tracking.plots import (
    WIDTH,
    RunData,
    bytes_over_steps,
    loss_over_bytes,
    loss_over_time,
    loss_over_tokens,
    seconds_per_round,
    tokens_per_second,
    utilization,
)
from dsx.tracking.round_plots import adaptation_over_rounds
from dsx.tracking.summary import RunSummary
from dsx.tracking.svg import to_svg
from dsx.tracking.text import DASH, bytes_text, count_text, number_text, seconds_text
from dsx.tracking.time_plots import membership, timeline


def write_report(run_dirs: Sequence[Path | str], output: Path | str) -> Path:
    """Write the page about one or more runs to `output`, whole or not at all.

    Raises `TrackingError` when a folder holds no metrics, or damaged ones, and when `output` is a
    folder, or a file that is no earlier report.
    """
    target = Path(output)
    if target.is_dir():
        raise TrackingError(
            f"{target} is a folder, so the page can't be written there; give it the name of a file "
            "with --output, or move that folder away"
        )
    if target.exists() and not page.is_page(target):
        raise TrackingError(
            f"{target} is there already and no report, so it stays as it is; give another name "
            "with --output, or remove it"
        )
    text = render_report(run_dirs)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def render_report(run_dirs: Sequence[Path | str]) -> str:
    """The page as text. Raises `TrackingError` as `write_report`."""
    read = [read_events(run_dir) for run_dir in run_dirs]
    for run_dir, events in zip(run_dirs, read, strict=True):
        if not events:
            raise TrackingError(f"{run_dir}: its metrics hold not one line; has the run started?")
    summaries = [
        RunSummary.from_events(events, Path(run_dir).resolve().name)
        for events, run_dir in zip(read, run_dirs, strict=True)
    ]
    labels = _distinct_labels([summary.name for summary in summaries], run_dirs)
    runs = [RunData(label, events) for label, events in zip(labels, read, strict=True)]
    starts = [of_kind(run.events, RunEvent)[-1:] for run in runs]
    settings, layouts, versions = (
        [getattr(start[0], name) if start else {} for start in starts]
        for name in ("settings", "layout", "versions")
    )
    title = ", ".join(labels)
    body = [
        f"<h1>{escape(title)}</h1>",
        '<p class="about">Report of dsx. Losses in nats per token.</p>',
        page.section("Summary", _summary_table(labels, summaries)),
        f'<h2>Plots</h2><div class="plots">{"".join(_plots(runs))}</div>',
        page.section("Clusters", _cluster_table(labels, summaries)),
        page.section("Layout", _flat_table(labels, layouts)),
        page.section("Versions", _flat_table(labels, versions)),
        page.folded("Settings", _flat_table(labels, settings)),
    ]
    return page.page(f"dsx: {title}", body)


def _plots(runs: Sequence[RunData]) -> list[str]:
    drawings = [
        ("loss", "Loss over tokens", loss_over_tokens(runs)),
        ("loss-bytes", "Loss over bytes", loss_over_bytes(runs)),
        ("loss-time", "Loss over time", loss_over_time(runs)),
        ("bytes", "Bytes sent over inner steps", bytes_over_steps(runs)),
        ("utilization", "Compute utilization over inner steps", utilization(runs)),
        ("speed", "Tokens per second over inner steps", tokens_per_second(runs)),
        ("rounds", "Steps, rank, bytes and exchange over rounds", adaptation_over_rounds(runs)),
    ]
    for number, run in enumerate(runs):
        one = "" if len(runs) == 1 else f"{run.label}: "
        per_run: list[tuple[str, str, Callable[[RunData, str], Figure | None]]] = [
            ("phases", "seconds of a round", seconds_per_round),
            ("timeline", "what every rank did", timeline),
            ("membership", "who took part", membership),
        ]
        for key, name, draw in per_run:
            title = f"{one}{name}" if one else name.capitalize()
            drawings.append((f"{key}-{number}", title, draw(run, title)))
    return [
        f'<figure id="plot-{key}"{_width_class(figure)}>'
        f"{to_svg(figure, key, escape(name))}</figure>"
        for key, name, figure in drawings
        if figure is not None
    ]


def _width_class(figure: Figure) -> str:
    return ' class="wide"' if figure.get_figwidth() > WIDTH else ""


def _summary_table(labels: Sequence[str], summaries: Sequence[RunSummary]) -> str:
    rows: list[tuple[str, Callable[[RunSummary], str]]] = [
        ("parameters", lambda s: count_text(s.parameters)),
        ("clusters", lambda s: str(len(s.clusters))),
        ("tokens", lambda s: count_text(s.tokens)),
        ("time", lambda s: seconds_text(s.seconds)),
        ("held-out loss of the shared weights", lambda s: number_text(s.shared_eval_loss)),
        ("held-out bits per byte", lambda s: number_text(s.bits_per_byte)),
        ("bytes sent between clusters", lambda s: bytes_text(s.bytes_exchanged)),
        ("per-step fp32 all-reduce would have sent", lambda s: bytes_text(s.all_reduce_bytes)),
        ("times fewer bytes", lambda s: number_text(s.times_fewer_bytes, digits=1)),
    ]
    return page.table(["", *labels], [[name, *(show(s) for s in summaries)] for name, show in rows])


def _cluster_table(labels: Sequence[str], summaries: Sequence[RunSummary]) -> str:
    header = ["cluster", "steps", "rounds", "tokens", "first loss", "last loss", "sent"]
    header += ["received", "inner compute", "blocked", "exchange"]
    rows = [
        [
            cluster.name if len(labels) == 1 else f"{label}: {cluster.name}",
            str(cluster.steps),
            str(cluster.rounds),
            count_text(cluster.tokens),
            number_text(cluster.first_loss),
            number_text(cluster.last_loss),
            bytes_text(cluster.bytes_sent),
            bytes_text(cluster.bytes_received),
            seconds_text(cluster.compute_seconds),
            seconds_text(cluster.blocked_seconds),
            seconds_text(cluster.exchange_seconds),
        ]
        for label, summary in zip(labels, summaries, strict=True)
        for cluster in summary.clusters
    ]
    return page.table(header, rows)


def _flat_table(labels: Sequence[str], values: Sequence[Mapping[str, Any]]) -> str:
    columns = [dict(_flatten(value)) for value in values]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    return page.table(
        ["", *labels], [[key, *(column.get(key, DASH) for column in columns)] for key in keys]
    )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested objects as rows: ("dsx.outer.local_steps", "20")."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            rows += _flatten(item, path)
        else:
            rows.append((path, str(item)))
    return rows


def _distinct_labels(names: Sequence[str], run_dirs: Sequence[Path | str]) -> list[str]:
    """The runs' names; where two are equal, their folders."""
    if len(set(names)) == len(names):
        return list(names)
    return [str(run_dir) for run_dir in run_dirs]
