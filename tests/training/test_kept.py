"""Which clusters run, and what the checkpoints of the others bring back."""

import json
from pathlib import Path

import pytest

from dsx.cli.main import main
from dsx.outer.leases import Leases
from dsx.outer.snapshot import EngineRecord, FlightRecord
from dsx.outer.steps import StepCounter
from dsx.tracking.ledger import Ledger
from dsx.training.holding import held, is_held
from dsx.training.kept import kept_by_stopped
from tests.checkpoint.made_up import save

FLIGHT = FlightRecord(
    base_round=0,
    local_steps=5,
    delay=1,
    norm=1.0,
    tokens=64,
    trained=[(0, 4)],
    step_seconds=1.0,
    exchange_seconds=0.0,
    measured_rank=0.0,
    step=5,
    rank=0,
    sound=True,
    outcome=None,
)
RECORD = EngineRecord(
    steps=StepCounter(),
    tokens=32,
    trained=[(4, 6)],
    todo=[],
    seconds=0.0,
    share=1.0,
    measured_rank=0.0,
    last_exchange_seconds=0.0,
    rounds_left_out=0,
    delays=[],
    bytes_sent=0,
    bytes_received=0,
    flight=FLIGHT,
)


def test_a_folder_is_held_while_its_cluster_runs(tmp_path: Path) -> None:
    assert not is_held(tmp_path, "c0")
    with held(tmp_path, "c0"):
        assert is_held(tmp_path, "c0")
        assert not is_held(tmp_path, "c1")
    assert not is_held(tmp_path, "c0")


def test_the_fate_of_tokens_follows_from_who_runs_and_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path, "c0")
    leases = Leases().deal({"c0": 8})
    ledger.start(16, 0, leases, [])
    ledger.step(1, [(0, 8)])

    def told() -> dict[str, int]:
        assert main(["audit", "--json", "--run", str(tmp_path)]) == 0
        fate: dict[str, int] = json.loads(capsys.readouterr().out)["clusters"]["c0"]
        return fate

    with held(tmp_path, "c0"):
        assert kept_by_stopped([tmp_path], ["c0"]) == {}
        assert told() == {"trained": 128, "committed": 0, "pending": 128, "lost": 0}
    assert told() == {"trained": 128, "committed": 0, "pending": 0, "lost": 128}
    save(tmp_path, round_=0, outer=RECORD.model_dump(), leases=leases)
    kept = kept_by_stopped([tmp_path], ["c0"])["c0"]
    assert (kept.name, kept.unsent, kept.round) == ("step-00000010", [(0, 4), (4, 6)], 0)
    assert told() == {"trained": 128, "committed": 0, "pending": 96, "lost": 32}
