"""`RUN/metrics-CLUSTER.jsonl`: the record of a run, one line an event, never rewritten."""

import json
import os
from pathlib import Path
from typing import TextIO

from dsx.tracking.events import Event, metrics_path, to_line


class JsonlSink:
    """Appends events to the cluster's file; each line is handed to the system when written."""

    def __init__(self, run_dir: Path | str, cluster: str) -> None:
        self.path = metrics_path(run_dir, cluster)
        self._file = open_lines(self.path)

    def write(self, event: Event) -> None:
        self._file.write(to_line(event))

    def close(self) -> None:
        self._file.close()


def open_lines(path: Path) -> TextIO:
    """A file of lines to append to; each is handed to the system when it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _end_last_line(path)
    return path.open("a", encoding="utf-8", buffering=1)


def _end_last_line(path: Path) -> None:
    """A process that died while writing leaves part of a line: new lines must not join it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if not content or content.endswith(b"\n"):
            return
        start = content.rfind(b"\n") + 1
        try:
            json.loads(content[start:])
        except ValueError:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
