"""Which checkpoint a cluster goes on from."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint import folders
from dsx.checkpoint.choosing import Choice, choose, is_finished, saved_since
from dsx.checkpoint.export import newest_checkpoint
from dsx.checkpoint.folders import RunFolder
from dsx.checkpoint.manifest import MANIFEST
from dsx.errors import CheckpointError
from tests.checkpoint.made_up import job, save, writer

FLYING = {"outer": {"flight": {}}, "flushed": False}


def chosen(run: Path, cluster: str = "c0", resume: str = "auto") -> Choice:
    choice = choose(run, cluster, resume)
    assert choice is not None
    return choice


def test_an_empty_run_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert choose(tmp_path / "none", "c0", "auto") is None
    assert choose(tmp_path / "none", "c0", "never") is None


def test_the_newest_round_that_any_cluster_has_is_that_of_all(tmp_path: Path) -> None:
    for step, round_ in ((10, 1), (20, 2)):
        save(tmp_path, "c0", step, round_=round_)
        save(tmp_path, "c1", step, round_=round_)
    save(tmp_path, "c0", 30, keep=3, round_=3)  # c1 died while it saved its own
    first, second = chosen(tmp_path, "c0"), chosen(tmp_path, "c1")
    assert (first.checkpoint.manifest.step, first.ahead) == (30, None)
    assert second.own
    assert second.checkpoint.manifest.step == 20
    assert second.ahead is not None
    assert second.ahead.manifest.step == 30
    assert second.ahead.shared_tensors("theta/")


def test_a_cluster_that_was_behind_has_nothing_left_to_do_when_another_has_finished(
    tmp_path: Path,
) -> None:
    save(tmp_path, "c0", 20, round_=2)
    save(tmp_path, "c1", 10, round_=1, flushed=False)
    checkpoint = chosen(tmp_path, "c1").finished(20)
    assert checkpoint is not None
    assert checkpoint.manifest.cluster == "c0"
    assert chosen(tmp_path, "c1").finished(21) is None


def test_the_state_of_another_run_in_the_folder_is_not_ahead(tmp_path: Path) -> None:
    save(tmp_path, "c0", 30, round_=3, began=2)
    save(tmp_path, "c1", 20, round_=2, began=1)
    assert chosen(tmp_path, "c1").ahead is None


def test_a_cluster_with_an_exchange_in_the_air_fits_one_that_has_seen_its_end(
    tmp_path: Path,
) -> None:
    for cluster in ("c0", "c1"):
        save(tmp_path, cluster, 10, round_=1)
    save(tmp_path, "c0", 21, round_=2, **FLYING)
    save(tmp_path, "c1", 22, round_=3)
    assert chosen(tmp_path, "c0").checkpoint.manifest.step == 21
    assert chosen(tmp_path, "c1").checkpoint.manifest.step == 22


def test_a_cluster_that_went_on_alone_goes_on_from_its_newest(tmp_path: Path) -> None:
    save(tmp_path, "c0", 10, round_=1)
    save(tmp_path, "c1", 10, round_=1)
    for step in (20, 30):  # c1's is gone by now
        save(tmp_path, "c0", step, round_=step // 10)
    assert chosen(tmp_path, "c0").checkpoint.manifest.step == 30


def test_a_cluster_without_a_checkpoint_starts_from_that_of_another(tmp_path: Path) -> None:
    save(tmp_path, "c0", 20, round_=2)
    save(tmp_path, "c1", 30, round_=3)
    choice = chosen(tmp_path, "c2")
    assert not choice.own
    assert choice.checkpoint.manifest.cluster == "c1"


def test_local_weights_are_nobody_elses_start(tmp_path: Path) -> None:
    folder = save(tmp_path, "c0", 20)
    assert choose(tmp_path, "c1", "auto") is None
    with pytest.raises(CheckpointError, match="has no shared weights from which c1 could start"):
        choose(tmp_path, "c1", str(folder))


def test_a_run_folder_that_was_moved_is_gone_on_from(tmp_path: Path) -> None:
    save(tmp_path / "here", "c0", 20, round_=2)
    shutil.move(tmp_path / "here", tmp_path / "there")
    for path in (tmp_path / "there", tmp_path / "there" / "checkpoints"):
        choice = chosen(tmp_path / "new", "c0", str(path))
        assert choice.own
        assert choice.checkpoint.manifest.step == 20


def test_one_path_for_all_clusters_means_each_ones_own_of_the_same_round(tmp_path: Path) -> None:
    older = {}
    for step, round_ in ((10, 1), (20, 2)):
        for cluster in ("c0", "c1"):
            older[cluster, step] = save(tmp_path, cluster, step, round_=round_)
    for cluster in ("c0", "c1"):
        choice = chosen(tmp_path / "new", cluster, str(older["c0", 10]))
        assert choice.own
        assert choice.checkpoint.folder.resolve() == older[cluster, 10].resolve()
    third = chosen(tmp_path / "new", "c2", str(older["c0", 10]))
    assert not third.own


@pytest.mark.parametrize("path", ["none", "empty", "file"])
def test_a_path_without_a_checkpoint_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=str(tmp_path / path)):
        choose(tmp_path / "run", "c0", str(tmp_path / path))
    (tmp_path / "empty" / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=str(tmp_path / "empty")):
        choose(tmp_path / "run", "c0", str(tmp_path / "empty"))


def test_a_run_of_which_every_checkpoint_is_damaged_is_no_fresh_start(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=str(folder)):
        choose(tmp_path, "c0", "auto")
    (folder / MANIFEST).unlink()
    (save(tmp_path, step=20) / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError) as refused:
        choose(tmp_path, "c0", "auto")
    head, first, second, way_on = str(refused.value).splitlines()
    assert head == f"{folder.parent} has no usable checkpoint:"
    assert first == f"  {folder} is no complete checkpoint: it has no {MANIFEST}"
    assert second.startswith(f"  {folder.parent}/step-00000020/{MANIFEST} is damaged: ")
    assert way_on.startswith("  start from another with --resume PATH")


def test_a_damaged_path_is_told_with_the_one_to_take_instead(tmp_path: Path) -> None:
    older, newer = save(tmp_path, step=10), save(tmp_path, step=20)
    (newer / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=f"take another: --resume .*{older.name}"):
        choose(tmp_path, "c0", str(newer))


def test_an_export_tells_which_newer_checkpoint_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = save(tmp_path, step=10)
    newer = save(tmp_path, step=20)
    assert newest_checkpoint(tmp_path).folder == newer
    assert caplog.messages == []

    (newer / MANIFEST).write_text("{}")
    assert newest_checkpoint(tmp_path).folder == older
    (told,) = caplog.messages
    assert told.startswith("left out: ")
    assert str(newer) in told


def test_never_refuses_a_used_run_folder(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(CheckpointError, match=r"choose another dsx\.run_dir"):
        choose(tmp_path, "c0", "never")


def test_a_manifest_of_another_format_names_both(tmp_path: Path) -> None:
    from dsx.checkpoint import manifest

    folder = save(tmp_path)
    body = manifest.read_manifest(folder, manifest.ClusterManifest).model_dump(mode="json")
    body["format"] = 2
    (folder / MANIFEST).write_text(manifest.json.dumps(body | {"crc32": manifest._checksum(body)}))
    with pytest.raises(CheckpointError, match="has format 2, this version of dsx reads 1"):
        choose(tmp_path, "c0", str(folder))


def test_a_cluster_can_not_have_the_shared_parts_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'shared'; choose another --cluster"):
        choose(tmp_path, "shared", "auto")


def test_finished_means_flushed_at_the_last_step(tmp_path: Path) -> None:
    save(tmp_path, "c0", 20)
    checkpoint = RunFolder(tmp_path).list("c0").complete[0]
    assert is_finished(checkpoint, 20)
    assert not is_finished(checkpoint, 21)
    assert not is_finished(checkpoint, 0)  # which asks for an evaluation
    save(tmp_path, "c0", 20, round_=2, **FLYING)
    assert not is_finished(RunFolder(tmp_path).list("c0").complete[0], 20)


def test_saved_since_looks_at_when_the_state_was_taken(tmp_path: Path) -> None:
    assert not saved_since(tmp_path, "c0", 0.0)
    save(tmp_path, "c0", time=100.0)
    assert saved_since(tmp_path, "c0", 100.0)
    assert not saved_since(tmp_path, "c0", 100.5)


def test_what_a_newcomer_reads_is_not_deleted_by_those_who_go_on(tmp_path: Path) -> None:
    save(tmp_path, "c0", 10, keep=1, round_=1)
    choice = chosen(tmp_path, "c1")
    folder = RunFolder(tmp_path)
    folder.hold(choice.checkpoint, "c1")
    for step in (20, 30):
        save(tmp_path, "c0", step, keep=1, round_=step // 10)
    assert choice.checkpoint.shared_tensors("theta/")
    assert all(value is not None for value in choice.checkpoint.shared_tensors("theta/").values())
    folder.release(choice.checkpoint, "c1")
    save(tmp_path, "c0", 40, keep=1, round_=4)
    assert not choice.checkpoint.folder.exists()
    assert not choice.checkpoint.shared_folder.exists()


def test_two_clusters_that_delete_the_same_old_parts_at_once_do_not_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    for round_ in (1, 2, 3):
        save(tmp_path, "c0", 10 * round_, keep=9, round_=round_)
    old = [c.shared_folder for c in folder.list("c0").complete[1:]]
    for path in old:
        os.utime(path, (1.0, 1.0))
    looked: list[Path] = []

    def is_held(path: Path) -> bool:
        """Just then the other cluster deletes all that is old."""
        if path in old:
            looked.append(path)
            for each in old:
                shutil.rmtree(each, ignore_errors=True)
        return False

    monkeypatch.setattr(folders, "_is_held", is_held)
    folder.retain("c0", 1)
    assert sorted(looked) == sorted(old)
    assert [c.manifest.step for c in folder.list("c0").complete] == [30]


def test_what_a_slow_cluster_still_writes_is_not_deleted_by_those_who_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "c0", 10, keep=1, round_=1)
    slow = writer(tmp_path, "c1", 1)
    complete = slow._complete

    def after_all_others(*arguments: Any) -> Path:
        for step in (20, 30):
            save(tmp_path, "c0", step, keep=1, round_=step // 10)
        return complete(*arguments)

    monkeypatch.setattr(slow, "_complete", after_all_others)
    slow.start(job("c1", 10, round_=1))
    slow.wait()
    slow.close()
    (checkpoint,) = RunFolder(tmp_path).list("c1").complete
    assert checkpoint.shared_tensors("theta/")
    assert not list(checkpoint.shared_folder.glob(folders.HELD))


def test_a_checkpoint_is_good_though_old_ones_could_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(RunFolder, "retain", fails)
    assert save(tmp_path, "c0", 10).is_dir()
    assert "old checkpoints could not be deleted: not yours" in caplog.text
