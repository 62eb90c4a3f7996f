"""What is left of a round when an exchange fails: nothing is lost, and nothing counts twice.

Clusters run in threads over the in-process exchange. A failure is an ExchangeError that is raised
when a message is on its way: the others have it, and this cluster hears of nobody.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dsx.errors import ExchangeError
from dsx.exchange.in_process import InProcessHub
from dsx.outer import deadlines
from dsx.outer import engine as engine_
from dsx.outer import round as round_
from dsx.outer.control import Observed
from dsx.outer.state import Progress
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import LOSSLESS, Cluster, together

STEPS, LOCAL_STEPS, TOKENS = 20, 4, 4
MOVE = 2.0**-10
AVERAGING = {"lr": 1.0, "momentum": 0.0, "compression": LOSSLESS}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(engine_, "_PAUSE_SECONDS", 0.0)


class Constant(Cluster):
    """Every inner step moves every weight by `MOVE`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.contributors: dict[int, dict[str, int]] = {}
        """Tokens by cluster of every round that was committed here."""
        decide = self.engine._control.decide

        def note(progress: Progress, observed: Observed) -> None:
            self.contributors[progress.round] = dict(progress.contributors)
            decide(progress, observed)

        self.engine._control.decide = note  # type: ignore[method-assign]

    def train(self, batch: object = None) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(MOVE)
        self.step += 1


class Failing:
    """Raises when a cluster comes to a phase, from a round on, so many times."""

    def __init__(self, cluster: Cluster, phase: str, round_number: int, times: int = 1) -> None:
        self.failed = 0
        self._cluster = cluster
        self._phase = phase
        self._round = round_number
        self._times = times
        cluster.engine.watch(self)

    def __call__(self, phase: str) -> None:
        due = phase == self._phase and self._cluster.engine.round >= self._round
        if due and self.failed < self._times:
            self.failed += 1
            raise ExchangeError("the link is down")


def make(settings: OuterSettings, count: int, kind: type[Cluster] = Constant) -> list[Cluster]:
    hub = InProcessHub([f"c{index}" for index in range(count)], timeout_seconds=30)
    return [kind(settings, hub.exchange(f"c{index}"), index) for index in range(count)]


def train(clusters: Sequence[Cluster], steps: int = STEPS) -> None:
    """Each in a thread of its own, as real clusters are: one that waits holds nobody up."""

    def whole(cluster: Cluster) -> None:
        cluster.engine.start()
        while cluster.engine.steps.step < steps:
            cluster.train()
            cluster.keep(cluster.engine.advance(tokens=TOKENS, seconds=0.01))
            cluster.keep(cluster.engine.settle())
        for report in cluster.engine.finish():
            cluster.keep(report)
        cluster.engine.close()

    together(clusters, whole)


def rounds_of(clusters: Sequence[Cluster]) -> dict[int, set[str]]:
    """Digests of theta by round, of all clusters."""
    digests: dict[int, set[str]] = {}
    for cluster in clusters:
        for report in cluster.reports:
            digests.setdefault(report.round, set()).add(report.shared_digest)
    return digests


def counts_once(before: dict[str, torch.Tensor], clusters: Sequence["Constant"]) -> None:
    """Every step is in theta once, in the round in which its cluster's tokens are counted."""
    expected = sum(
        sum(count**2 for count in counted.values()) / sum(counted.values()) / TOKENS * MOVE
        for counted in _contributions(clusters).values()
    )
    for cluster in clusters:
        for name, value in cluster.engine.theta.items():
            torch.testing.assert_close(before[name] - value, torch.full_like(value, expected))
            assert torch.equal(value, clusters[0].engine.theta[name])
    trained = sum(cluster.step * TOKENS for cluster in clusters)
    assert clusters[0].engine.state.progress.tokens_total == trained
    assert all(len(digests) == 1 for digests in rounds_of(clusters).values())


def _contributions(clusters: Sequence["Constant"]) -> dict[int, dict[str, int]]:
    """Tokens by cluster of every round; clusters that saw a round tell the same of it."""
    rounds: dict[int, dict[str, int]] = {}
    for cluster in clusters:
        for number, counted in cluster.contributors.items():
            assert rounds.setdefault(number, counted) == counted
    return rounds


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("delay", [0, 2, "round"])
@pytest.mark.parametrize("phase", ["headers", "encode", "transfer", "vote"])
def test_a_failed_exchange_is_made_good_and_every_token_counts_once(
    phase: str, delay: int | str, count: int
) -> None:
    settings = OuterSettings(
        local_steps=LOCAL_STEPS, delay=delay, start_clusters=count, **AVERAGING
    )
    clusters = make(settings, count)
    before = clusters[0].weights()
    failing = Failing(clusters[-1], phase, round_number=2)
    train(clusters)
    assert failing.failed == 1
    counts_once(before, clusters)


@pytest.mark.parametrize("phase", ["headers", "transfer", "vote"])
def test_a_round_that_fails_to_its_end_joins_the_next_one(phase: str) -> None:
    """Longer than a cluster tries: what was made stays with it, and is sent with what follows."""
    settings = OuterSettings(
        local_steps=LOCAL_STEPS, delay=2, start_clusters=2, timeout_seconds=1e-3, **AVERAGING
    )
    clusters = make(settings, 2)
    before = clusters[0].weights()
    failing = Failing(clusters[1], phase, round_number=2, times=2)
    train(clusters)
    assert failing.failed == 2
    counts_once(before, clusters)


def test_a_repeated_exchange_gives_the_bits_of_one_that_succeeded() -> None:
    """The error feedback takes note of it once, and the divisor is that of those who take part."""
    settings = OuterSettings(local_steps=LOCAL_STEPS, delay=2, start_clusters=2)
    undisturbed = make(settings, 2, Cluster)
    train(undisturbed)
    clusters = make(settings, 2, Cluster)
    failing = Failing(clusters[1], "transfer", round_number=2, times=3)
    train(clusters)
    assert failing.failed == 3
    assert rounds_of(clusters) == rounds_of(undisturbed)


def test_whoever_did_not_hear_that_a_round_was_committed_does_not_send_it_again() -> None:
    """c1's vote reaches c0, which commits; c1 hears of nobody and can't know."""
    settings = OuterSettings(local_steps=LOCAL_STEPS, delay=2, start_clusters=2, lr=1.0, momentum=0)
    clusters = make(settings, 2, Cluster)
    healed: list[tuple[int, int]] = []
    _note_healing(clusters[1], healed)
    failing = Failing(clusters[1], "vote", round_number=2)
    train(clusters)
    assert failing.failed == 1
    assert healed == [(3, LOCAL_STEPS * 3)]
    shared = clusters[0].engine.state.tensors()
    for name, value in clusters[1].engine.state.tensors().items():
        assert torch.equal(value, shared[name])
    # What its codec left out of that round is remembered, as if it had been heard of.
    assert clusters[1].engine.averager.residual_square() > 0


def _note_healing(cluster: Cluster, healed: list[tuple[int, int]]) -> None:
    settle: Callable[[str], None] = cluster.engine._round._settle_doubts

    def note(name: str) -> None:
        doubts = list(cluster.engine._round._doubts)
        settle(name)
        counted = cluster.engine.state.progress.counted[name]
        healed.extend(
            (cluster.engine.round, doubt.contribution.step)
            for doubt in doubts
            if counted == (doubt.round, doubt.contribution.step)
        )

    cluster.engine._round._settle_doubts = note  # type: ignore[method-assign]


def test_who_has_not_begun_waits_for_a_coordinator_that_is_away_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "_SHORTEST_SECONDS", 0.0)
    (cluster,) = make(OuterSettings(local_steps=LOCAL_STEPS, **AVERAGING), 1)
    away = Failing(cluster, "join", 0, times=3)
    train([cluster])
    assert away.failed == 3
    assert caplog.text.count("round 0 is repeated: the link is down") == 1
    assert cluster.engine.round == STEPS / LOCAL_STEPS


def test_a_joiner_that_is_lost_in_mid_transfer_harms_nobody() -> None:
    settings = OuterSettings(local_steps=LOCAL_STEPS, delay=2, start_clusters=2, **AVERAGING)
    clusters = make(settings, 2)
    before = clusters[0].weights()
    hub = clusters[0].exchange._hub  # type: ignore[attr-defined]
    lost = threading.Event()

    def join_and_die(late: Cluster) -> None:
        def die(phase: str) -> None:
            if phase == "heal":
                lost.set()
                late.exchange.close()
                raise SystemExit

        late.engine.watch(die)
        with pytest.raises(SystemExit):
            late.engine.start()

    joined: list[threading.Thread] = []

    def come_at_round_two(phase: str) -> None:
        if clusters[0].engine.round >= 2 and not joined:
            late = Constant(settings, hub.exchange("late"), 2)
            joined.append(threading.Thread(target=join_and_die, args=(late,)))
            joined[0].start()

    clusters[0].engine.watch(come_at_round_two)
    train(clusters)
    joined[0].join(30)
    assert lost.is_set()
    counts_once(before, clusters)


def test_of_two_histories_of_a_round_the_one_that_met_later_holds() -> None:
    """Clusters that were cut off from each other have both committed round 1, apart."""
    settings = OuterSettings(local_steps=LOCAL_STEPS, delay=0, start_clusters=2, **AVERAGING)
    clusters = make(settings, 2)
    together(clusters, lambda cluster: cluster.engine.start())
    for cluster, moved, met in zip(clusters, (1.0, 2.0), (7, 9), strict=True):
        for value in cluster.engine.theta.values():
            value.add_(moved)
        cluster.engine.state.progress.round = 1
        cluster.engine.state.progress.met = met
        cluster.engine._round.rehash()
    held = {name: value.clone() for name, value in clusters[1].engine.theta.items()}
    clusters[0].engine._weights.store(clusters[0].engine.theta)
    clusters[1].engine._weights.store(clusters[1].engine.theta)
    for _ in range(2):
        for _ in range(LOCAL_STEPS):
            for cluster in clusters:
                cluster.train()
                cluster.engine.advance(tokens=TOKENS, seconds=0.01)
        together(clusters, lambda cluster: cluster.engine.settle())
    # c1 counts in both rounds; c0 in the second, with the steps of both.
    first = held_minus(held, LOCAL_STEPS * MOVE)
    second = held_minus(first, (2 * LOCAL_STEPS * 2 + LOCAL_STEPS) / 3 * MOVE)
    for cluster in clusters:
        for name, value in cluster.engine.theta.items():
            torch.testing.assert_close(value, second[name], rtol=0, atol=1e-6)


def held_minus(values: dict[str, torch.Tensor], moved: float) -> dict[str, torch.Tensor]:
    return {name: value - moved for name, value in values.items()}
