"""What `dsx doctor` finds wrong, with what to do about it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsx.cli import main
from dsx.exchange.coordinator import Coordinator
from dsx.exchange.secret import RunSecret
from tests.settings.files import changed, written

LISTENER = """
import socket, sys
listener = socket.create_server((sys.argv[2], 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    code = main.main(["doctor", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["rows"]


def row(rows: list[dict[str, Any]], check: str) -> dict[str, Any]:
    (found,) = [row for row in rows if row["check"] == check]
    return found


def test_a_sound_machine_is_told_as_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    RunSecret.create(tmp_path / "secret")
    secret = RunSecret.read(tmp_path / "secret")
    words = ["--secret-file", str(tmp_path / "secret")]
    words += ["--deepspeed_config", "configs/quickstart.json"]
    with Coordinator("127.0.0.1:0", secret=secret) as coordinator:
        _, rows = doctor(capsys, *words, "--coordinator", coordinator.address)
    # Others may listen on this machine.
    assert [row for row in rows if row["wrong"] and row["check"] != "listening"] == []
    assert "lets this cluster in" in row(rows, "coordinator")["found"]
    assert "readable by its owner alone" in row(rows, "run secret")["found"]
    assert row(rows, "corpus")["found"].startswith("python-stdlib, ")
    assert row(rows, "settings")["found"] == "quickstart: sound"
    assert row(rows, "model")["found"] == "3.34 M parameters, 4 layers in 2 stages"
    assert {"torch", "deepspeed", "deepspeed command", "GPUs", "wandb mode"} <= {
        row["check"] for row in rows
    }


def test_everything_that_is_wrong_comes_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    RunSecret.create(tmp_path / "secret")
    (tmp_path / "secret").chmod(0o644)
    run_dir = tmp_path / "secret" / "run"
    changes = {"dsx.data.source": str(tmp_path / "nothing.txt"), "dsx.run_dir": str(run_dir)}
    path = written(tmp_path, changed(**changes))
    words = ["--secret-file", str(tmp_path / "secret"), "--deepspeed_config", str(path)]
    with Coordinator("127.0.0.1:0", secret=RunSecret(b"o" * 32)) as coordinator:
        code, rows = doctor(capsys, *words, "--coordinator", coordinator.address)
    assert code == 1
    fixes = {row["check"]: row["fix"] for row in rows if row["wrong"]}
    assert fixes["run secret"] == f"chmod 600 {tmp_path / 'secret'}"
    assert fixes["coordinator"].startswith("give --secret-file FILE")
    assert fixes["GLOO_SOCKET_IFNAME"].startswith("set it to one of")
    assert "set it to online" in fixes["wandb mode"]
    assert fixes["corpus"]
    assert fixes["run folder"] == "choose another folder, or make this one writable"


def test_settings_that_are_wrong_are_a_row_beside_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--deepspeed_config", "configs/quickstart.json", "--set", "dsx.outer.delai=0"]
    code, rows = doctor(capsys, *words)
    assert code == 2
    assert "did you mean dsx.outer.delay" in row(rows, "settings")["found"]
    assert "deepspeed command" in {row["check"] for row in rows}


def test_a_model_that_can_not_be_split_as_set_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--deepspeed_config", "configs/quickstart.json", "--set", "dsx.pipeline.stages=9"]
    code, rows = doctor(capsys, *words)
    assert code == 1
    assert "9 pipeline stages can't share 4 layers" in row(rows, "model")["found"]


@pytest.mark.parametrize("address", ["127.0.0.1:29510", "http://203.0.113.5:29510"])
def test_an_address_that_no_machine_could_use_is_a_wrong_argument(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.delenv("DSX_SECRET_FILE", raising=False)
    code, rows = doctor(capsys, "--coordinator", address)
    assert code == 2
    assert row(rows, "coordinator")["fix"]


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    key = "dsx.outer.a_key_that_is_longer_than_any_column"
    words = ["--deepspeed_config", "configs/quickstart.json", "--set", f"{key}=0"]
    assert main.main(["doctor", *words]) == 2
    lines = [
        line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")
        for line in capsys.readouterr().out.splitlines()
    ]
    found = "".join(cells[3].strip() for cells in lines if len(cells) == 6)
    assert key in found


@pytest.mark.parametrize(("host", "wrong"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_what_listens_on_all_interfaces_is_wrong_and_what_is_on_one_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str, wrong: bool
) -> None:
    # Not the user whose processes these are, as in a container or behind sudo.
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "nobody-here")
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, "dsx.train", host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        code, rows = doctor(capsys)
        (found,) = [row for row in rows if row["found"].startswith(f"{host}:{port},")]
        assert found["wrong"] == wrong
        assert str(process.pid) in found["found"]
        assert ("firewall" in found["fix"]) == wrong
        assert code == 1 or not wrong
    finally:
        process.communicate("")


def test_an_override_of_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--set", "dsx.seed=3"]) == 2
    assert "--set dsx.seed=3 changes a settings file" in capsys.readouterr().err
