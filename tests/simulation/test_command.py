"""`dsx simulate` as it is typed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsx.cli.main import main


@pytest.fixture(scope="module")
def command(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("command")
    settings = folder / "settings.json"
    settings.write_text(json.dumps(raw))
    words = ["simulate", "--deepspeed_config", str(settings), "--clusters", "2"]
    return [*words, "--output", str(folder / "out")]


def test_a_sweep_prints_every_run_and_draws_its_plots(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--sweep", "outer.own_share=none,all", "--baseline", "allreduce", "single"]
    link = ["--link", "1mbit", "--latency", "10ms", "--step-seconds", "0.01"]
    assert main([*command, *sweep, *link, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["runs"]
    names = [run["name"] for run in shown]
    assert names == ["allreduce", "single", "outer.own_share=none", "outer.own_share=all"]
    allreduce, single, none, everything = shown
    assert allreduce["kept"] == 1
    assert single["kept"] == 0
    gap = single["loss"] - allreduce["loss"]
    assert everything["kept"] == pytest.approx((single["loss"] - everything["loss"]) / gap)
    assert everything["settings"] == {"dsx.outer.own_share": "all"}
    assert none["loss"] != everything["loss"]
    assert everything["link_seconds"] > single["link_seconds"] > 0
    assert [point["step"] for point in everything["curve"]] == [6, 12]
    folder = Path(command[-1])
    plots = {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert set(plots) == {f"loss-over-{axis}.svg" for axis in ("tokens", "bytes", "time")}
    assert "outer.own_share=all" in plots["loss-over-bytes.svg"]

    # Everything is there already, and the table says the same.
    assert main([*command, *sweep]) == 0
    out, err = capsys.readouterr()
    assert err.count("kept from before") == 4
    assert f"{everything['loss']:.4f}" in out

    # Two processes at a time give what one gave.
    elsewhere = ["--jobs", "2", "--output", str(folder / "elsewhere")]
    assert main([*command, *sweep[:2], *elsewhere, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["runs"]
    assert [run["loss"] for run in again] == [none["loss"], everything["loss"]]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--sweep", "outer.lr=2,-1"], "dsx.outer.lr"),
        (["--sweep", "outer.momentun=0.5"], "momentum"),
        (["--link", "fast"], "100mbit"),
        (["--seeds", "a"], "0,1,2"),
        (["--jobs", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_first_run(
    command: list[str], wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--output", "never-made", *wrong]) == 2
    assert told in capsys.readouterr().err
    assert not Path("never-made").exists()
