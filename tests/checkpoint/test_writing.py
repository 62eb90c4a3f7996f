"""A checkpoint is complete or absent, whatever happens while it is written."""

import errno
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsx.checkpoint import writer as writer_module
from dsx.checkpoint.choosing import choose
from dsx.checkpoint.folders import RunFolder, open_checkpoint, rank_file
from dsx.checkpoint.manifest import MANIFEST
from dsx.checkpoint.tensor_file import describe_tensors, write_tensors
from dsx.errors import CheckpointError
from tests.checkpoint.made_up import job, save, values, writer


def test_the_file_is_what_safetensors_reads_and_its_size_is_known_before(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(4, 3),
        "transposed": torch.randn(4, 3).T,
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "half": torch.randn(5).bfloat16(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "long": torch.tensor([2**40, -1]),
        "flags": torch.tensor([True, False]),
    }
    path = tmp_path / "file.safetensors"
    write_tensors(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value)
    assert describe_tensors(tensors).bytes == path.stat().st_size
    with pytest.raises(FileExistsError):
        write_tensors(path, tensors)


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, step=10, round_=2)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest.step == 10
    assert checkpoint.manifest.settings["weights"] == {"10": "a number as key", "9": "another"}
    for name, value in values(10).items():
        assert torch.equal(checkpoint.tensors("master/")[name], value)
    for name, value in values(1002).items():
        assert torch.equal(checkpoint.shared_tensors("theta/")[name], value)
    assert list(checkpoint.tensors("nothing/")) == []


def test_the_shared_part_of_a_round_is_written_once_for_all_clusters(tmp_path: Path) -> None:
    first = save(tmp_path, "c0", 10, round_=2)
    shared = open_checkpoint(first).shared_folder
    before = {path.name: path.stat().st_mtime_ns for path in shared.iterdir()}
    own = writer(tmp_path, "c1")
    own.start(job("c1", 11, round_=2))
    second = own.wait()
    assert second is not None
    assert open_checkpoint(second).shared_folder == shared
    assert {path.name: path.stat().st_mtime_ns for path in shared.iterdir()} == before
    assert own.bytes == (second / rank_file(0)).stat().st_size


def test_a_file_that_another_cluster_has_begun_is_waited_for(tmp_path: Path) -> None:
    """The claim of the other is there before, and becomes the file while this one waits."""
    prepared = job("c1", 11, round_=2)
    assert prepared.shared is not None
    assert prepared.shared.tensors is not None
    folder = RunFolder(tmp_path).path / "shared" / prepared.shared.name
    folder.mkdir(parents=True)
    claim = folder / f".{rank_file(0)}.claim"
    write_tensors(claim, prepared.shared.tensors)
    own = writer(tmp_path, "c1")
    own.start(prepared)
    claim.rename(folder / rank_file(0))
    saved = own.wait()
    assert saved is not None
    assert open_checkpoint(saved).shared is not None


def test_a_file_that_another_cluster_never_ends_is_written_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PATIENCE_SECONDS", 0.2)
    prepared = job("c1", 11, round_=2)
    assert prepared.shared is not None
    folder = RunFolder(tmp_path).path / "shared" / prepared.shared.name
    folder.mkdir(parents=True)
    (folder / f".{rank_file(0)}.claim").write_bytes(b"half a fi")
    own = writer(tmp_path, "c1")
    own.start(prepared)
    saved = own.wait()
    assert saved is not None
    assert torch.equal(
        open_checkpoint(saved).shared_tensors("theta/")["b.bias"], values(1002)["b.bias"]
    )


def test_a_checkpoint_whose_shared_part_has_gone_is_not_completed(tmp_path: Path) -> None:
    shared = open_checkpoint(save(tmp_path, "c0", 10, round_=2)).shared_folder
    prepared = job("c1", 11, round_=2)
    assert prepared.shared is not None
    own = writer(tmp_path, "c1")
    assert own.has_shared(shared.name)
    (shared / rank_file(0)).unlink()
    own.start(replace(prepared, shared=replace(prepared.shared, tensors=None)))
    with pytest.raises(CheckpointError, match=f"{shared} is damaged"):
        own.wait()
    assert RunFolder(tmp_path).list("c1").complete == []


def test_only_the_newest_are_kept_and_shared_parts_as_long_as_a_cluster_needs_them(
    tmp_path: Path,
) -> None:
    def shared() -> set[int]:
        folders = (RunFolder(tmp_path).path / "shared").iterdir()
        return {int(path.name.split("-")[1]) for path in folders}

    for number in range(1, 5):
        save(tmp_path, "c0", 10 * number, keep=2, round_=number)
        if number < 3:
            save(tmp_path, "c1", 10 * number, keep=1, round_=number)
        # Time stamps are as coarse as the kernel's ticks.
        for path in (RunFolder(tmp_path).path / "shared").iterdir():
            os.utime(path, (number, number))
    steps = [c.manifest.step for c in RunFolder(tmp_path).list("c0").complete]
    assert steps == [40, 30]
    assert [c.manifest.step for c in RunFolder(tmp_path).list("c1").complete] == [20]
    assert shared() == {2, 3, 4}


def test_a_step_that_is_saved_again_by_another_history_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, step=10, keep=9)
    save(tmp_path, step=20, keep=9)
    again = save(tmp_path, step=10, keep=9)
    assert again.name == "step-00000010-2"
    choice = choose(tmp_path, "c0", "auto")
    assert choice is not None
    assert choice.checkpoint.folder == again


def test_a_full_disk_leaves_the_checkpoint_before_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(tmp_path, step=10)

    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "write_tensors", full)
    own = writer(tmp_path)
    own.start(job(step=20))
    with pytest.raises(CheckpointError, match=r"step 20 could not be written.*No space left"):
        own.wait()
    monkeypatch.undo()
    assert [c.folder for c in RunFolder(tmp_path).list("c0").complete] == [kept]
    assert list(kept.parent.glob(".*")) == []
    own.start(job(step=30))
    assert own.wait() is not None


def test_a_failed_write_is_logged_when_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path, tensors: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer_module, "write_tensors", broken)
    own = writer(tmp_path)
    own.start(job(step=20))
    own.close()
    assert (
        "Input/output error. Training goes on, the checkpoints before it are untouched"
        in caplog.text
    )


def save_and_die(folder: Path, at: int, counted: Path) -> None:
    """Two saves; in the second one, the process is killed at its fsync number `at`."""
    save(folder, step=10, round_=1)
    real, calls = os.fsync, []

    def deadly(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = deadly
    save(folder, step=20, round_=2)
    counted.write_text(str(len(calls)))


def in_a_process(*args: object) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def test_a_kill_anywhere_inside_the_save_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    """Every system call that brings something to the disk is a moment to die at."""
    counted = tmp_path / "count"
    assert in_a_process(tmp_path / "whole", 0, counted) == 0
    count = int(counted.read_text())
    assert count >= 6
    found = []
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        assert in_a_process(folder, at, counted) == -signal.SIGKILL
        assert RunFolder(folder).list("c0").damaged == []
        choice = choose(folder, "c0", "auto")
        assert choice is not None
        found.append(choice.checkpoint.manifest.step)
        # The last moments to die at are in the retention, after the rename.
        assert bool(choice.notes) == (found[-1] == 10)
        # The next save clears up.
        save(folder, step=30, round_=3)
        assert RunFolder(folder).list("c0").complete[0].manifest.step == 30
        assert list(RunFolder(folder).cluster_folder("c0").glob(".*")) == []
    assert found == sorted(found)
    assert set(found) == {10, 20}


def test_a_file_that_was_cut_is_passed_over_and_told(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step=step, round_=step // 10)
    newest = RunFolder(tmp_path).list("c0").complete[0]
    for victim in (
        newest.shared_folder / rank_file(0),
        newest.folder / rank_file(0),
        newest.folder / MANIFEST,
    ):
        whole = victim.read_bytes()
        victim.write_bytes(whole[: len(whole) // 2])
        choice = choose(tmp_path, "c0", "auto")
        assert choice is not None
        assert choice.checkpoint.manifest.step == 10
        assert len(choice.notes) == 1
        assert str(newest.folder) in choice.notes[0]
        with pytest.raises(CheckpointError, match=str(newest.folder)):
            choose(tmp_path, "c0", str(newest.folder))
        victim.write_bytes(whole)
    assert choose(tmp_path, "c0", "auto").checkpoint.manifest.step == 20  # type: ignore[union-attr]


def test_a_flipped_bit_is_found_when_the_tensor_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / rank_file(0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    tensors = open_checkpoint(folder).tensors("master/")
    assert torch.equal(tensors["a.weight"], values(10)["a.weight"])
    with pytest.raises(CheckpointError, match=f"{path} is damaged: the checksum of master/b.bias"):
        tensors["b.bias"]


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(CheckpointError, match=f"{path} is damaged: its checksum"):
        open_checkpoint(folder)
