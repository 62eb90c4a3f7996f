import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from dsx.errors import LaunchError
from dsx.training.holding import held


def hold(run_dir: Path, ready: Event) -> None:
    with held(run_dir, "c0"):
        ready.set()
        signal.pause()


def test_a_second_launch_of_a_cluster_is_kept_out(tmp_path: Path) -> None:
    with held(tmp_path / "run", "c0"):
        with (
            pytest.raises(LaunchError, match=r"cluster 'c0' of another launch is running in '.*'"),
            held(tmp_path / "run", "c0", patience=0),
        ):
            pass
        with held(tmp_path / "run", "c1", patience=0), held(tmp_path / "other", "c0", patience=0):
            pass
    with held(tmp_path / "run", "c0", patience=0):
        pass


def test_a_killed_launch_lets_go(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(120)
    with pytest.raises(LaunchError), held(tmp_path, "c0", patience=0):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with held(tmp_path, "c0"):
        pass
    process.join()
