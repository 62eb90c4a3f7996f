"""A run that goes on from a checkpoint whose damage shows only when its tensors are read."""

from pathlib import Path

import pytest

from dsx.checkpoint.damage import older
from dsx.checkpoint.folders import RunFolder, open_checkpoint, rank_file
from dsx.errors import CheckpointError
from dsx.training.run import Launch
from tests.checkpoint.made_up import save
from tests.checkpoint.settings import raw_settings
from tests.distributed import run_ranks


@pytest.mark.multiprocess
def test_a_run_that_reads_damage_names_the_checkpoint_to_take_instead(folder: Path) -> None:
    launch = Launch("c0", None, None, "auto")
    run_ranks("tests.checkpoint.workers:train", 1, raw_settings(folder, "run", steps=14), launch)
    newest, before = RunFolder(folder / "run").list("c0").complete
    path = newest.folder / rank_file(0)
    content = bytearray(path.read_bytes())
    content[content.index(b"}}") + 1000] ^= 1
    path.write_bytes(content)

    longer = raw_settings(folder, "run", steps=20)
    with pytest.raises(AssertionError) as refused:
        run_ranks("tests.checkpoint.workers:train", 1, longer, launch)
    assert f"{path} is damaged: the checksum of" in str(refused.value)
    assert f"  take another: --resume {before.folder}" in str(refused.value)
    again = Launch("c0", None, None, str(before.folder))
    assert run_ranks("tests.checkpoint.workers:train", 1, longer, again) == [None]


def test_a_checkpoint_of_the_same_round_serves_where_only_the_own_part_is_damaged(
    tmp_path: Path,
) -> None:
    for step, round_ in ((10, 1), (20, 2), (25, 2)):
        save(tmp_path, "c0", step, keep=3, round_=round_)
    newest, same_round, before = complete = RunFolder(tmp_path).list("c0").complete
    assert newest.manifest.shared == same_round.manifest.shared

    own = newest.folder / rank_file(0)
    assert older(newest, own, complete) == [same_round, before]
    shared = newest.shared_folder / rank_file(0)
    assert older(newest, shared, complete) == [before]


def test_a_shared_part_is_not_taken_for_a_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "c0", 10, round_=1)
    (checkpoint,) = RunFolder(tmp_path).list("c0").complete
    with pytest.raises(CheckpointError, match="holds the shared part of checkpoints"):
        open_checkpoint(checkpoint.shared_folder)
