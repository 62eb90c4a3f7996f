"""What to show of a failed cluster's log: the cause, not what followed from it."""

import re
import signal
from pathlib import Path

_OWN_ERROR = re.compile(r"dsx: (?P<name>\w+Error): (?P<message>.*)")
_TRACEBACK = "Traceback (most recent call last)"
# What DeepSpeed's launcher says about its own doings, and the end that it puts to the others; what
# was for the progress display.
_NOISE = re.compile(r"\[(launch|runner)\.py:\d+:\w+\]|\[dsx\] phase: ")
_LAST_LINES = 15
_TRACEBACK_LINES = 30
_FAR = 400


def first_error(log: Path, start: int = 0) -> str:
    """The error that a cluster's ranks died of, as well as its log tells.

    The message of the first dsx error after byte `start`; else the first traceback near the end
    (the ranks that follow fail because the first one did); else the last lines.
    """
    lines = _lines(log, start)
    for number, line in enumerate(lines):
        if found := _OWN_ERROR.search(line):
            # A message may go on in indented lines.
            more = lines[number + 1 :]
            end = next((i for i, text in enumerate(more) if not text.startswith(" ")), len(more))
            return "\n".join([f"{found['name']}: {found['message']}", *more[:end]])
    near = lines[-_FAR:]
    for number, line in enumerate(near):
        if _TRACEBACK in line:
            return "\n".join(near[number : number + _TRACEBACK_LINES])
    return "\n".join(lines[-_LAST_LINES:]) or "it left no output"


def explain_exit(code: int) -> str:
    """An exit code in words: the launcher's for a rank that a signal ended is 256 - the signal."""
    try:
        name = signal.Signals(256 - code).name
    except ValueError:
        return f"exit code {code}"
    more = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"exit code {code} (a process was ended by {name}{more})"


def is_consequence(error: str) -> bool:
    """Whether the error is one that another cluster's end causes: the exchange broke."""
    return error.startswith("ExchangeError") or "ExchangeError:" in error.splitlines()[-1]


def _lines(log: Path, start: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", errors="replace")
    lines = (line.rstrip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and not _NOISE.search(line)]
