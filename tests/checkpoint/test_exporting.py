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
from dsx.checkpoint.folders import RunFolder, open_checkpoint, rank_file
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


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of a made-up model: all is read, and nothing made of it."""

    def read_all(
        config: Any, tensors: Any, tokenizer: Any, output: Path, *_: Any, **__: Any
    ) -> None:
        dict(tensors)
        output.mkdir()

    monkeypatch.setattr("dsx.checkpoint.export.export_hf", read_all)
    monkeypatch.setattr("dsx.checkpoint.export.config_from_dict", lambda config: config)


def save_made_up(run: Path, step: int, **options: Any) -> Path:
    return save(run, step=step, settings={"dsx": {"model": {"init": "random"}}}, **options)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("with_others", [False, True])
def test_damage_that_shows_when_it_is_read_is_told_with_the_checkpoint_to_take_instead(
    tmp_path: Path, copying: None, capsys: pytest.CaptureFixture[str], with_others: bool
) -> None:
    older = save_made_up(tmp_path, 10, round_=1 if with_others else None)
    newer = save_made_up(tmp_path, 20, round_=2 if with_others else None)
    weights = open_checkpoint(newer).shared_folder if with_others else newer
    flip_a_bit(weights / rank_file(0))
    words = ["export", "--run", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(words) == 1
    told = capsys.readouterr().err.splitlines()
    assert "is damaged: the checksum of" in told[0]
    assert told[1:] == [f"  take another: --checkpoint {older}"]

    assert main([*words, "--checkpoint", str(older)]) == 0
    shutil.rmtree(older)
    assert main(words) == 1
    assert "there is none to take instead" in capsys.readouterr().err


def test_an_export_without_a_tokenizer_says_so(
    tmp_path: Path, copying: None, caplog: pytest.LogCaptureFixture
) -> None:
    save_made_up(tmp_path, 10)
    export_run(tmp_path, tmp_path / "out")
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path}/tokenizer is not there, so {tmp_path}/out has no tokenizer")
    caplog.clear()
    (tmp_path / "tokenizer").mkdir()
    export_run(tmp_path, tmp_path / "out")
    assert caplog.messages == []


def test_a_damaged_checkpoint_is_no_export(tmp_path: Path) -> None:
    saved = save(tmp_path)
    (saved / "manifest.json").write_text("{")
    other = save(tmp_path, step=20)
    (other / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as refused:
        export_run(tmp_path, tmp_path / "out")
    head, first, second, way_on = str(refused.value).splitlines()
    assert head == f"{tmp_path} holds no complete checkpoint:"
    assert first.startswith(f"  {saved}/manifest.json is damaged")
    assert second == f"  {other} is no complete checkpoint: it has no manifest.json"
    assert "--checkpoint" in way_on
    with pytest.raises(CheckpointError, match=str(saved)):
        export_run(tmp_path, tmp_path / "out", checkpoint=saved)
    assert not (tmp_path / "out").exists()
