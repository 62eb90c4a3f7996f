"""`dsx export` from real checkpoints: the weights that it names, in a folder transformers loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsx.checkpoint.export import ORIGIN, export_run
from dsx.checkpoint.folders import RunFolder
from dsx.cli.main import main
from dsx.errors import CheckpointError, ModelError
from dsx.models.export import export_hf
from dsx.training.run import Launch
from tests.checkpoint.made_up import save
from tests.checkpoint.settings import raw_settings
from tests.distributed import run_ranks


def assert_holds(folder: Path, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert set(expected) <= set(loaded)
    for name, value in expected.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], value.to(dtype)), name


@pytest.mark.multiprocess
def test_every_kept_checkpoint_exports_the_weights_that_it_names(
    folder: Path,
    coordinators: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"stages": 2, "tied": True, "steps": 14}
    joined = raw_settings(folder, "joined", outer={"delay": 2}, bf16=True, **options)
    plain = raw_settings(folder, "plain", **options)
    run_ranks(
        "tests.checkpoint.workers:train", 2, joined, Launch("c0", coordinators(), None, "auto")
    )
    run_ranks("tests.checkpoint.workers:train", 2, plain, Launch("c0", None, None, "auto"))

    kept = RunFolder(folder / "joined").list("c0").complete
    assert len(kept) == 2
    for number, checkpoint in enumerate(kept):
        told = export_run(folder / "joined", folder / f"hf-{number}", checkpoint=checkpoint.folder)
        shared = dict(checkpoint.shared_tensors("theta/"))
        assert_holds(told.output, shared, torch.bfloat16)
        assert (told.weights, told.step) == ("shared", checkpoint.manifest.step)
        assert told.round == checkpoint.manifest.round
        assert told.flushed == (number == 0)
        assert ("not flushed" in str(told)) == (number == 1)
    assert AutoTokenizer.from_pretrained(folder / "hf-0").encode("alpha beta")

    words = ["export", "--run", str(folder / "plain"), "--output", str(folder / "hf-plain")]
    assert main(words) == 0
    assert "the local weights of cluster c0 at step 14, fp32" in capsys.readouterr().out
    kept = RunFolder(folder / "plain").list("c0").complete
    assert [checkpoint.manifest.step for checkpoint in kept] == [14, 10]
    for checkpoint in kept:
        told = export_run(folder / "plain", folder / "hf-local", checkpoint=checkpoint.folder)
        assert_holds(told.output, dict(checkpoint.tensors("master/")), torch.float32)
        assert (told.weights, told.step) == ("local", checkpoint.manifest.step)
    newest = kept[0]
    assert_holds(folder / "hf-plain", dict(newest.tensors("master/")), torch.float32)
    # What ends a document in the data, not in the family's own vocabulary.
    assert json.loads((folder / "hf-plain" / "config.json").read_text())["eos_token_id"] == 0
    told = export_run(folder / "plain", folder / "hf-half", dtype="bf16")
    assert_holds(told.output, dict(newest.tensors("master/")), torch.bfloat16)

    again = export_run(folder / "plain", folder / "hf-0")  # an earlier export is replaced
    assert_holds(again.output, dict(newest.tensors("master/")), torch.float32)
    origin = json.loads((folder / "hf-0" / ORIGIN).read_text())
    assert (origin["weights"], origin["step"]) == ("local", 14)
    assert not list(folder.glob("*.new")) + list(folder.glob("*.partial"))
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("three years of work")
    with pytest.raises(ModelError, match="mine' is not empty"):
        export_run(folder / "plain", folder / "mine")
    assert (folder / "mine" / "thesis.txt").exists()

    def overtaken(*arguments: Any, **options: Any) -> None:
        """A run that goes on keeps newer ones, and removes what is about to be read."""
        monkeypatch.undo()
        shutil.rmtree(newest.folder)
        export_hf(*arguments, **options)

    monkeypatch.setattr("dsx.checkpoint.export.export_hf", overtaken)
    told = export_run(folder / "plain", folder / "hf-local")
    assert told.checkpoint == kept[1].folder
    assert_holds(told.output, dict(kept[1].tensors("master/")), torch.float32)


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete checkpoint"):
        export_run(tmp_path, tmp_path / "out")


def test_a_damaged_checkpoint_is_no_export(tmp_path: Path) -> None:
    saved = save(tmp_path)
    (saved / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(saved)):
        export_run(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=str(saved)):
        export_run(tmp_path, tmp_path / "out", checkpoint=saved)
    assert not (tmp_path / "out").exists()
