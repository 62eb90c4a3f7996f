"""The command line of a rank: mistakes that are told before anything is built."""

from pathlib import Path

import pytest

from dsx import train
from tests.settings.files import changed, valid, written


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = train.main(words)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dsx: ")]
    return code, "\n".join(errors)


def test_wrong_settings_end_with_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(written(tmp_path, valid()))
    code, said = call(capsys, "--deepspeed_config", path, "--set", "dsx.outer.localsteps=3")
    assert code == 2
    assert said.startswith("dsx: SettingsError: ")
    assert "did you mean dsx.outer.local_steps?" in said


def test_an_address_that_is_none_is_told_before_the_model_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(written(tmp_path, valid()))
    code, said = call(capsys, "--deepspeed_config", path, "--coordinator", "127.0.0.1:29510")
    assert code == 2
    assert said == (
        "dsx: SettingsError: --coordinator is '127.0.0.1:29510'; give an address like "
        "http://127.0.0.1:29510"
    )


def test_a_number_of_processes_that_is_no_multiple_of_the_stages_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, said = call(capsys, "--deepspeed_config", str(written(tmp_path, valid())))
    assert code == 2
    assert "3 processes can't be split into pipelines of 2 stages" in said
    assert "--num_gpus" in said


def test_a_run_folder_in_which_nothing_can_be_written_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "file").write_text("")
    path = written(tmp_path, changed(**{"dsx.run_dir": str(tmp_path / "file" / "run")}))
    code, said = call(capsys, "--deepspeed_config", str(path))
    assert code == 1
    assert f"dsx.run_dir is '{tmp_path}/file/run', where nothing can be written" in said
    assert "Not a directory" in said


def test_arguments_are_not_guessed_from_their_beginnings() -> None:
    with pytest.raises(SystemExit, match="2"):
        train.parse(["--deepspeed_config", "x.json", "--clust", "site-a"])
