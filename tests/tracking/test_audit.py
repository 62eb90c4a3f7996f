"""What `dsx audit` says of ledgers that are right, and of those that can't be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsx.cli.main import main
from dsx.errors import TrackingError
from dsx.outer.leases import KEPT_ROUNDS, Leases, Part, Ranges, split
from dsx.tracking.audit import Audit, audit, table
from dsx.tracking.ledger import Ledger, read_ledgers

SEQ_LEN, ROUND = 16, 4


class Run:
    """Made-up clusters that train four samples a round and keep their ledgers."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder = folder
        self.round = 0
        self.leases = Leases()
        self.ledgers = {name: Ledger(folder, name) for name in names}
        self.start(*names)

    def start(self, *names: str, trained: Ranges | None = None) -> None:
        for name in names:
            self.ledgers[name] = Ledger(self.folder, name)
            self.ledgers[name].start(SEQ_LEN, self.round, self.leases, trained or [])

    def train(self, name: str, samples: int = ROUND) -> Ranges:
        dealt = self.leases.deal(dict.fromkeys(self.ledgers, ROUND))
        mine, _ = split((self.leases if name in self.leases.held else dealt).held[name], samples)
        self.ledgers[name].step(self.round, mine)
        return mine

    def commit(self, *names: str, seen_by: str | None = None, digest: str = "") -> None:
        trained = {name: self.train(name) for name in names}
        self.make(trained, names if seen_by is None else tuple(seen_by), digest)

    def make(self, trained: dict[str, Ranges], seen_by: tuple[str, ...], digest: str = "") -> None:
        admitted = self.leases.admit(trained)
        self.leases = admitted.commit({n: Part(ROUND, mine) for n, mine in trained.items()})
        self.round += 1
        for name in seen_by:
            self.ledgers[name].round(self.round, digest or f"after {self.round}", self.leases)

    def audit(self) -> Audit:
        return audit(read_ledgers([self.folder]))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, "ab")
    for _ in range(5):
        made.commit("a", "b")
    return made


def test_a_run_without_failures_has_committed_all_that_it_trained(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run.audit()
    assert result.is_clean
    assert result.rounds == 5
    for fate in result.clusters.values():
        assert fate.trained == fate.committed == 5 * ROUND * SEQ_LEN
        assert fate.pending == fate.lost == 0
    assert main(["audit", "--run", str(run.folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == list(table(result))
    assert printed[0] == "tokens in 5 committed rounds"
    assert [line.split() for line in printed[2:5]] == [
        ["a", "320", "320", "0", "0"],
        ["b", "320", "320", "0", "0"],
        ["all", "640", "640", "0", "0"],
    ]
    assert printed[-2:] == ["never trained: 0", "trained twice: 0"]
    assert main(["audit", "--json", "--run", str(run.folder)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clusters"]["a"]["lost"] == 0
    assert told["is_clean"] is True


def test_what_a_killed_cluster_had_trained_is_lost_and_trained_by_the_others(run: Run) -> None:
    run.train("b")
    for _ in range(KEPT_ROUNDS + 20):
        run.commit("a")
    result = run.audit()
    assert result.is_clean
    assert result.clusters["b"].lost == ROUND * SEQ_LEN
    assert result.clusters["a"].lost == 0


def test_what_is_trained_again_after_a_restart_was_lost_once(run: Run) -> None:
    run.train("b")
    assert run.audit().clusters["b"].pending == ROUND * SEQ_LEN
    run.start("b")
    assert run.audit().clusters["b"].lost == ROUND * SEQ_LEN
    run.commit("a", "b")
    fate = run.audit().clusters["b"]
    assert (fate.lost, fate.pending) == (ROUND * SEQ_LEN, 0)
    assert fate.committed == 6 * ROUND * SEQ_LEN


def test_what_a_restart_brings_with_it_is_not_lost(run: Run) -> None:
    mine = run.train("b")
    run.start("b", trained=mine)
    assert run.audit().clusters["b"].pending == ROUND * SEQ_LEN
    run.make({"a": run.train("a"), "b": mine}, ("a", "b"))
    assert run.audit().clusters["b"].lost == 0
    run.train("a")
    run.ledgers["a"].end()
    assert run.audit().clusters["a"].lost == ROUND * SEQ_LEN, "the run is over"


def test_rounds_that_are_made_again_from_an_older_checkpoint_count_once(run: Run) -> None:
    saved = run.round, run.leases
    for _ in range(3):
        run.commit("a", "b")
    run.round, run.leases = saved
    run.start("a", "b")
    for _ in range(2):
        run.commit("a", "b", digest="another")
    run.commit("a", "b")
    run.commit("a", "b")
    result = run.audit()
    assert result.is_clean
    assert result.rounds == 9
    # The rounds are the same ones, trained twice and committed once; one is new.
    assert result.clusters["a"].committed == 9 * ROUND * SEQ_LEN
    assert result.clusters["a"].lost == 3 * ROUND * SEQ_LEN
    assert not result.trained_twice


def test_a_round_that_one_cluster_alone_has_seen_counts(run: Run) -> None:
    run.commit("a", "b", seen_by="a")
    run.commit("a", "b", seen_by="b")
    result = run.audit()
    assert result.is_clean
    assert result.rounds == 7


def changed(run: Run, change: Callable[[Leases], None]) -> Audit:
    leases = run.leases.model_copy(deep=True)
    change(leases)
    leases.parent, leases.history = run.leases.history, "made up"
    for ledger in run.ledgers.values():
        ledger.round(run.round + 1, "made up", leases)
    return run.audit()


def test_tokens_that_were_passed_over_are_told(run: Run) -> None:
    result = changed(run, lambda leases: leases.held.update(a=leases.held["a"][1:]))
    assert result.never_trained > 0
    assert not result.is_clean
    assert main(["audit", "--run", str(run.folder)]) == 1


def test_tokens_that_were_trained_twice_are_told(run: Run) -> None:
    result = changed(run, lambda leases: None)
    assert result.trained_twice == 2 * ROUND * SEQ_LEN
    assert not result.is_clean


def test_tokens_that_nobody_says_were_trained_are_told(run: Run) -> None:
    def take(leases: Leases) -> None:
        leases.committed = {"a": [(leases.frontier, leases.frontier + 2)]}
        leases.frontier += 2

    result = changed(run, take)
    assert any("2" in p and "does not say that they were trained" in p for p in result.problems)


def test_ledgers_that_disagree_are_told(run: Run) -> None:
    trained = {name: run.train(name) for name in "ab"}
    run.make(trained, ("a",), digest="one")
    run.ledgers["b"].round(run.round, "other", run.leases)
    (problem,) = run.audit().problems
    assert "different shared weights after round 6 (digests one and other)" in problem


def test_a_round_that_all_have_made_again_may_have_other_bits_than_at_first(run: Run) -> None:
    before = run.leases
    run.commit("a", "b", digest="as it was made first")
    run.round, run.leases = 5, before
    run.start("a", "b")
    run.commit("a", "b", digest="as it was made again")
    result = run.audit()
    assert result.is_clean
    assert result.rounds == 6
    assert {fate.lost for fate in result.clusters.values()} == {ROUND * SEQ_LEN}


def test_a_branch_that_ended_beside_the_run_is_told(run: Run) -> None:
    saved = run.round, run.leases
    run.commit("b")
    run.round, run.leases = saved
    for _ in range(2):
        run.commit("a")
    (problem,) = run.audit().problems
    assert "cluster b ended with a round 6 that is not the one of the run's history" in problem


def test_a_round_that_no_ledger_has_is_told(run: Run) -> None:
    run.commit("a", "b", seen_by="")
    run.commit("a", "b")
    assert "no ledger tells what round 6 committed" in run.audit().problems


def test_a_ledger_that_is_elsewhere_is_asked_for(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (run.folder / "ledger-b.jsonl").rename(other / "ledger-b.jsonl")
    (problem,) = run.audit().problems
    assert "cluster b took part, but its ledger is not here" in problem
    assert main(["audit", "--run", str(run.folder), str(other)]) == 0


def test_a_half_written_last_line_is_left_out_and_a_damaged_one_is_named(run: Run) -> None:
    path = run.folder / "ledger-a.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind":"step","st')
    assert run.audit().is_clean
    path.write_text(whole.replace('"step"', '"stop"', 1))
    with pytest.raises(TrackingError, match=r"ledger-a.jsonl, line 2 is no line of a ledger"):
        run.audit()
    with pytest.raises(TrackingError, match=r"holds no ledger-\*.jsonl"):
        read_ledgers([run.folder / "nowhere"])
