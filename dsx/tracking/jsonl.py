"""`RUN/metrics-CLUSTER.jsonl`: the record of a run, one line an event, never rewritten."""

import json
import logging
import os
from pathlib import Path

from dsx.tracking.events import Event, metrics_path, to_line

log = logging.getLogger(__name__)


class JsonlSink:
    """Appends events to the cluster's file."""

    def __init__(self, run_dir: Path | str, cluster: str) -> None:
        self.path = metrics_path(run_dir, cluster)
        self._lines = LineFile(self.path)

    def write(self, event: Event) -> None:
        self._lines.write(to_line(event))

    def close(self) -> None:
        self._lines.close()


class LineFile:
    """A file of lines to append to; each is handed to the system when it is written.

    Lines that can't be written (a full disk) wait for the next that can: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._told = False

    def write(self, line: str) -> None:
        """`line` ends with a newline."""
        self._waiting += line.encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._told:
                log.warning(
                    "%s can't be written (%s): training goes on, and the lines wait until it can",
                    *(self._path, error.strerror),
                )
        self._told = bool(self._waiting)

    def close(self) -> None:
        if self._waiting:
            log.error("%s lacks its last %d bytes", self._path, len(self._waiting))
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
