"""One progress bar on stderr for a long preparation; nothing where stderr is not a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def build_progress() -> Iterator[Progress]:
    """A `rich` progress display, with the bars of `datasets` silenced while it shows."""
    had_bars = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    console = Console(stderr=True)
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        ) as progress:
            yield progress
    finally:
        if had_bars:
            datasets.enable_progress_bars()
