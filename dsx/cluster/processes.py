"""Start a command with everything that it starts, and end all of it.

The `deepspeed` command starts a launcher, that starts the ranks, and those start helpers (wandb's
service has a session of its own). A signal to one doesn't reach the others, and the command
reports success when its launcher was killed. So each command gets a session, and a mark in its
environment that all its descendants inherit.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

MARK = "DSX_PROCESS_TREE"
_RANK = "LOCAL_RANK"
"""In the environment of a rank, and not of the launcher that started it."""
LEFT_BEHIND_SECONDS = 10.0
"""How long descendants may outlive a command that succeeded."""
_POLL_SECONDS = 0.05


class ProcessTree:
    """A running command and all its descendants. Its output is appended to a log file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._left_behind_since: float | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.log_start = output.tell()
            """Where in the log the output of this start begins."""
            self._process = subprocess.Popen(
                list(command),
                env={**environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """None while the tree runs. A command that leaves others behind for good has failed."""
        code = self._process.poll()
        if code != 0 or not self.members():
            return code
        now = time.monotonic()
        if self._left_behind_since is None:
            self._left_behind_since = now
        return None if now - self._left_behind_since < LEFT_BEHIND_SECONDS else 1

    def members(self) -> list[psutil.Process]:
        """The processes of the tree that are alive."""
        return [
            process
            for process in psutil.process_iter()
            if self._belongs(process) and _is_alive(process)
        ]

    def signal(self, number: int) -> None:
        """Send a signal to the command and all its descendants."""
        for process in self.members():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def ask_to_end(self) -> None:
        """SIGTERM to the ranks, or to all while there are none.

        The command must not get it: it would kill its ranks 30 seconds later, and ends with them by
        itself.
        """
        members = self.members()
        for process in [one for one in members if _has(one, _RANK)] or members:
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue

    def is_gone(self) -> bool:
        """Whether the command and all its descendants have ended."""
        return self._process.poll() is not None and not self.members()

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) == self._process.pid:
                return True
            return bool(process.environ().get(MARK) == self._mark)
        except (psutil.Error, OSError):
            return False


def end_all(
    trees: Sequence[ProcessTree], grace_seconds: float, hurry: Callable[[], bool] = lambda: False
) -> None:
    """Ask all to end, and kill what is left after `grace_seconds`. Returns when all are gone.

    `hurry` ends the grace early once it is true.
    """
    for tree in trees:
        tree.ask_to_end()
    deadline = time.monotonic() + grace_seconds
    left = [tree for tree in trees if not tree.is_gone()]
    while left:
        if time.monotonic() >= deadline or hurry():
            # Again and again: a process may have started another in the meantime.
            for tree in left:
                tree.signal(signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        left = [tree for tree in left if not tree.is_gone()]


def _has(process: psutil.Process, variable: str) -> bool:
    try:
        return variable in process.environ()
    except (psutil.Error, OSError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
