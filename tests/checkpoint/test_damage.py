"""A run that goes on from a checkpoint whose damage shows only when its tensors are read."""

from pathlib import Path

import pytest

from dsx.checkpoint.folders import RunFolder, rank_file
from dsx.training.run import Launch
from tests.checkpoint.settings import raw_settings
from tests.distributed import run_ranks


@pytest.mark.multiprocess
def test_a_run_that_reads_damage_names_the_checkpoint_to_take_instead(folder: Path) -> None:
    launch = Launch("c0", None, None, "auto")
    run_ranks("tests.checkpoint.workers:train", 1, raw_settings(folder, "run", steps=14), launch)
    newest, older = RunFolder(folder / "run").list("c0").complete
    path = newest.folder / rank_file(0)
    content = bytearray(path.read_bytes())
    content[content.index(b"}}") + 1000] ^= 1
    path.write_bytes(content)

    longer = raw_settings(folder, "run", steps=20)
    with pytest.raises(AssertionError) as refused:
        run_ranks("tests.checkpoint.workers:train", 1, longer, launch)
    assert f"{path} is damaged: the checksum of" in str(refused.value)
    assert f"  take another: --resume {older.folder}" in str(refused.value)
    again = Launch("c0", None, None, str(older.folder))
    assert run_ranks("tests.checkpoint.workers:train", 1, longer, again) == [None]
