"""`RUN/metrics-CLUSTER.jsonl`: the record of a run, one line an event, never rewritten."""

import json
import os
from pathlib import Path

from dsx.tracking.events import Event, metrics_path, to_line


class JsonlSink:
    """Appends events to the cluster's file; each line is handed to the system when written."""

    def __init__(self, run_dir: Path | str, cluster: str) -> None:
        self.path = metrics_path(run_dir, cluster)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(self.path)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        self._file.write(to_line(event))

    def close(self) -> None:
        self._file.close()


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
