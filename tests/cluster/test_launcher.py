"""The command that starts the same ranks again, from what the launcher was told."""

import base64
import json
from pathlib import Path

import pytest

from dsx.cluster.launcher import go_on_command, launched_world, launcher_words


@pytest.fixture(autouse=True)
def usual_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")


def test_the_world_is_read_from_the_launchers_words() -> None:
    world = {"one": [0, 1], "two": [0, 1]}
    coded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    assert launched_world(["python", "-m", "x", f"--world_info={coded}", "train"]) == world
    assert launched_world(["bash"]) == {}


def test_one_machine_needs_a_count_and_the_port_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = launcher_words({"localhost": [0, 1]}, 2, tmp_path / "hostfile")
    assert words == ["deepspeed", "--num_gpus", "2"]
    monkeypatch.setenv("MASTER_PORT", "29601")
    words = launcher_words({}, 2, tmp_path / "hostfile")
    assert words == ["deepspeed", "--num_gpus", "2", "--master_port", "29601"]
    assert not (tmp_path / "hostfile").exists()


def test_devices_that_were_chosen_are_named() -> None:
    words = launcher_words({"localhost": [2, 3]}, 2, Path("unused"))
    assert words == ["deepspeed", "--include", "localhost:2,3"]


def test_several_machines_are_written_to_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "run" / "hostfile-c0"
    words = launcher_words({"one": [0, 1], "two": [1]}, 3, file)
    assert words == [
        *("deepspeed", "--hostfile", str(file)),
        *("--include", "one:0,1@two:1", "--master_addr", "10.0.0.1"),
    ]
    assert file.read_text() == "one slots=2\ntwo slots=2\n"


def test_what_to_go_on_with_leaves_out_the_old_checkpoint(tmp_path: Path) -> None:
    words = ["--local_rank=0", "--resume", "old", "--cluster", "site-b"]
    assert go_on_command("dsx.train", words, 2, tmp_path / "hostfile") == (
        "deepspeed --num_gpus 2 --module dsx.train --cluster site-b"
    )
