"""A run folder takes one launch of each cluster at a time.

Two would write into the same metrics and remove each other's checkpoints.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from dsx.errors import LaunchError

_PATIENCE = 10.0
"""Seconds in which processes that were just killed let go of the folder."""


@contextmanager
def held(run_dir: str | Path, cluster: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Keep other launches of this cluster out of the run folder.

    The lock ends with the process, however that ends; the file stays.

    Args:
        patience: seconds to wait for a launch before this one to end.

    Raises:
        LaunchError: another launch of this cluster still runs in the folder.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(_lock_file(folder, cluster), timeout=patience)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise LaunchError(
            f"cluster {cluster!r} of another launch is running in {str(folder)!r}; wait for it, "
            "stop it, or choose another dsx.run_dir"
        ) from error
    except NotImplementedError:
        # A file system without locks: nothing to hold on to.
        yield
        return
    try:
        yield
    finally:
        lock.release()


def is_held(run_dir: str | Path, cluster: str) -> bool:
    """Whether a launch of this cluster runs in the folder; True, too, where that can't be known.

    It changes nothing, and needs to read only.
    """
    try:
        with _lock_file(Path(run_dir), cluster).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # Somebody has it, or the file system has no locks.
    return False


def _lock_file(run_dir: Path, cluster: str) -> Path:
    return run_dir / f".{cluster}.lock"
