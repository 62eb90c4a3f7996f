"""What `dsx audit` says of ledgers that are right, and of those that can't be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsx.cli.main import main
from dsx.errors import TrackingError
from dsx.outer.leases import KEPT_ROUNDS, Leases, Part, Ranges, split
from dsx.tracking.audit import Audit, Kept, audit, table
from dsx.tracking.ledger import Ledger, read_ledgers
from dsx.training.holding import held

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

    def audit(self, **kept: Kept) -> Audit:
        """`kept`: of the clusters that do not run."""
        return audit(read_ledgers([self.folder]), kept)

    def save(self, unsent: Ranges | None = None) -> Kept:
        return Kept(f"step-{self.round}", unsent or [], self.round, self.leases)


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
    with held(run.folder, "a"), held(run.folder, "b"):
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


def test_what_a_stopped_cluster_had_not_saved_is_lost_before_it_goes_on(run: Run) -> None:
    saved = run.save()
    run.train("b")
    assert run.audit().clusters["b"].pending == ROUND * SEQ_LEN, "it runs"
    for kept in (saved, Kept()):
        result = run.audit(b=kept)
        fate = result.clusters["b"]
        assert (fate.pending, fate.lost) == (0, ROUND * SEQ_LEN)
        (note,) = result.notes
        assert "cluster b does not run: the 64 tokens that it trained last are lost" in note
        assert note in table(result)
        assert result.is_clean
        assert result.as_json()["clusters"]["b"]["lost"] == ROUND * SEQ_LEN


def test_what_a_stopped_cluster_has_saved_is_still_on_its_way(run: Run) -> None:
    mine = run.train("b")
    result = run.audit(b=run.save(mine[:1]))
    assert result.clusters["b"].pending == ROUND * SEQ_LEN
    assert result.clusters["b"].lost == 0
    (note,) = result.notes
    assert "64 tokens are in its newest checkpoint (step-5), and count once it goes on" in note
    for _ in range(KEPT_ROUNDS + 1):
        run.commit("a")
    assert run.audit(b=run.save(mine)).clusters["b"].lost == ROUND * SEQ_LEN, "others have them"


def test_rounds_that_no_cluster_has_saved_are_lost_when_all_have_stopped(run: Run) -> None:
    saved = run.save()
    for _ in range(2):
        run.commit("a", "b")
    assert run.audit(a=saved).clusters["a"].committed == 7 * ROUND * SEQ_LEN, "b has them"
    result = run.audit(a=saved, b=saved)
    assert result.is_clean
    assert result.rounds == 5
    for fate in result.clusters.values():
        assert (fate.committed, fate.lost) == (5 * ROUND * SEQ_LEN, 2 * ROUND * SEQ_LEN)
    assert "the newest checkpoint holds round 5: rounds 6 to 7 were committed" in result.notes[0]
    nothing = Run(run.folder / "early", "ab")
    at_once = nothing.save()
    nothing.commit("a", "b")
    result = nothing.audit(a=at_once, b=at_once)
    assert (result.rounds, result.clusters["a"].committed) == (0, 0)


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
    assert any(
        "32 tokens" in p and "round 6" in p and "ledger-a.jsonl" in p for p in result.problems
    )
    assert result.clusters["a"].lost == 0


def test_a_ledger_from_which_steps_were_cut_loses_nothing_below_zero(run: Run) -> None:
    path = run.folder / "ledger-a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if '"kind":"step"' in line]
    del lines[steps[2]]
    path.write_text("".join(lines))
    result = run.audit()
    assert result.clusters["a"].lost == 0
    (problem,) = result.problems
    assert "64 tokens of cluster a are committed in round 3" in problem
    assert "ledger-a.jsonl was changed or cut" in problem


def test_what_was_trained_in_another_run_folder_counts_as_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, "ab")
    run.commit("a", "b")
    brought = split(run.leases.held["b"], ROUND)[0]
    run.start("b", trained=brought)
    fate = run.audit().clusters["b"]
    assert (fate.trained, fate.pending, fate.lost) == (2 * ROUND * SEQ_LEN, ROUND * SEQ_LEN, 0)


def test_ledgers_that_disagree_are_told(run: Run) -> None:
    trained = {name: run.train(name) for name in "ab"}
    run.make(trained, ("a",), digest="one")
    run.ledgers["b"].round(run.round, "other", run.leases)
    (problem,) = run.audit().problems
    assert "different shared weights after round 6 (digests one and other)" in problem


def test_one_ledger_that_tells_a_round_in_two_ways_is_told(run: Run) -> None:
    run.ledgers["b"].round(run.round, "other", run.leases)
    (problem,) = run.audit().problems
    assert "cluster b held two states after round 5 (digests after 5 and other)" in problem
    run.start("b")
    run.ledgers["b"].round(run.round, "a third", run.leases)
    assert len(run.audit().problems) == 2, "it had started with round 5, not before it"


def test_a_cluster_that_died_before_it_made_a_round_again_disagrees_with_nobody(run: Run) -> None:
    before = run.leases
    run.commit("a", "b", digest="as it was made first")
    run.round, run.leases = 5, before
    run.start("a", "b")
    run.commit("a", "b", seen_by="b", digest="as it was made again")
    assert run.audit().is_clean


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
    path.write_text(whole.replace('"trained":[[0,4]]', '"trained":[[4,0]]', 1))
    with pytest.raises(TrackingError, match=r"ledger-a.jsonl, line 2 .*\[4, 0\) is no range"):
        run.audit()
    path.write_text(whole.replace('"trained":[[0,4]]', '"trained":[[0,4],[2,3]]', 1))
    with pytest.raises(TrackingError, match=r"line 2 .*sample 2 is in two ranges"):
        run.audit()
    path.write_text(whole)
    with pytest.raises(TrackingError, match=r"holds no ledger-\*.jsonl"):
        read_ledgers([run.folder / "nowhere"])
