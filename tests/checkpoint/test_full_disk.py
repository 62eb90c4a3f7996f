"""A disk that is full for a while: training goes on, and nothing that was saved is lost."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.checkpoint.folders import RunFolder
from dsx.training.run import Launch
from tests.checkpoint.settings import raw_settings
from tests.checkpoint.workers import checksums, history
from tests.distributed import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, in memory; who may not mount one gets a plain folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        yield disk
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_training_goes_on_while_the_disk_is_full_and_saves_when_it_is_not(
    folder: Path, small_disk: Path
) -> None:
    words = Launch("c0", None, None, "auto")
    roomy, cramped = raw_settings(folder, "roomy"), raw_settings(folder, "cramped")
    cramped["dsx"]["run_dir"] = str(small_disk)
    run_ranks("tests.checkpoint.workers:train", 1, roomy, words)
    (told,) = run_ranks("tests.checkpoint.workers:train_on_a_full_disk", 1, cramped, words)

    # Those of steps 20 and 30 could not be written; the one before them was kept, and complete.
    for step in (20, 30):
        assert f"the checkpoint of step {step} could not be written" in told
    assert told.count(". Training goes on, the checkpoints before it are untouched") == 2
    if small_disk.is_mount():
        assert told.count("No space left on device. Training goes on") == 2
        assert told.count("metrics-c0.jsonl can't be written (No space left on device)") == 1
    kept = RunFolder(small_disk).list("c0")
    assert [checkpoint.manifest.step for checkpoint in kept.complete] == [36, 10]
    assert (kept.damaged, kept.unfinished) == ([], [])
    assert checksums(small_disk) == checksums(folder / "roomy")
    # Every line of the metrics is there after all.
    assert history(small_disk) == history(folder / "roomy")
