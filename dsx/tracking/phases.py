"""How a cluster tells whoever started it what it is doing before there are metrics."""

import re

_MARK = "[dsx] phase: "
_PATTERN = re.compile(re.escape(_MARK) + r"([^\x1b\r\n]*)")


def announce(phase: str, rank: int = 0) -> None:
    """Say on the standard output what this cluster does now, for example "preparing data".

    Of a cluster's ranks only rank 0 says it. `dsx local` shows it in its progress display.
    """
    if rank == 0:
        print(f"{_MARK}{phase}", flush=True)


def phase_in(line: str) -> str | None:
    """The phase that a line of a cluster's log announces."""
    found = _PATTERN.search(line)
    return found.group(1).strip() if found else None
