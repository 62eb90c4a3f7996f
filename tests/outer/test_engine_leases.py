"""Engines whose clusters come, go and fail: every sample has one fate."""

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.in_process import InProcessHub
from dsx.outer.leases import KEPT_ROUNDS, LEASED_ROUNDS, Leases
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import STEP_SAMPLES, Reader, together

STEPS = 3
ROUND = STEPS * STEP_SAMPLES


def make(names: str, hub: InProcessHub | None = None, **changes: object) -> list[Reader]:
    settings = OuterSettings.model_validate({"local_steps": STEPS, "delay": 0, **changes})
    hub = hub or InProcessHub(names, timeout_seconds=30)
    return [Reader(settings, hub.exchange(name), index) for index, name in enumerate(names)]


def rounds(clusters: Iterable[Reader], count: int = 1) -> None:
    """In lockstep, on clusters that have started."""
    for _ in range(STEPS * count):
        for cluster in clusters:
            cluster.train()
            cluster.keep(cluster.engine.advance(tokens=STEP_SAMPLES, seconds=0.01))
        reports = together(list(clusters), lambda cluster: cluster.engine.settle())
        for cluster, report in zip(clusters, reports, strict=True):
            cluster.keep(report)  # type: ignore[arg-type]


def committed(clusters: Iterable[Reader]) -> tuple[Counter[int], Leases]:
    """How often every position was committed, by the newest state's history; and that state."""
    known = {r.leases.history: r.leases for cluster in clusters for r in cluster.reports}
    newest = max((c.reports[-1] for c in clusters if c.reports), key=lambda report: report.round)
    times: Counter[int] = Counter()
    leases: Leases | None = newest.leases
    for _ in range(newest.round):
        assert leases is not None
        for ranges in leases.committed.values():
            times.update(p for start, end in ranges for p in range(start, end))
        leases = known.get(leases.parent)
    assert leases is None
    assert newest.tokens_total == times.total(), "tokens are those of the samples"
    return times, newest.leases


def assert_one_fate(clusters: Iterable[Reader]) -> None:
    times, leases = committed(clusters)
    for ranges in (leases.returned, *leases.held.values()):
        times.update(p for start, end in ranges for p in range(start, end))
    assert times == Counter(range(leases.frontier))


def test_the_clusters_of_a_round_train_neighbouring_samples() -> None:
    clusters = make("ab")
    together(clusters, lambda cluster: cluster.engine.start())
    rounds(clusters, 2 * LEASED_ROUNDS)
    for number, report in enumerate(clusters[0].reports):
        start = 2 * number * ROUND
        assert report.leases.committed == {
            "a": [(start, start + ROUND)],
            "b": [(start + ROUND, start + 2 * ROUND)],
        }
    assert_one_fate(clusters)


@pytest.mark.parametrize("away", [KEPT_ROUNDS, KEPT_ROUNDS + 2])
def test_clusters_that_come_late_leave_and_return_train_what_nobody_else_does(away: int) -> None:
    hub = InProcessHub("ab", timeout_seconds=30)
    first, second = make("ab", hub)
    together([first, second], lambda cluster: cluster.engine.start())
    rounds([first, second], 2)
    (late,) = make("c", hub)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(late.engine.start)
        rounds([first, second])
        came.result()
    rounds([first, second, late], 2)
    lease = first.engine.state.progress.leases.held["b"]
    second.engine.close()
    rounds([first, late], away)
    held = first.engine.state.progress.leases.held
    assert held.get("b") == (lease if away <= KEPT_ROUNDS else None)
    (again,) = make("b", hub)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(again.engine.start)
        rounds([first, late])
        came.result()
    rounds([first, late, again], LEASED_ROUNDS)
    everybody = [first, second, late, again]
    assert_one_fate(everybody)
    trained = {"a": first.drawn, "b": second.drawn + again.drawn, "c": late.drawn}
    for report in first.reports:
        for name, ranges in report.leases.committed.items():
            assert {p for start, end in ranges for p in range(start, end)} <= set(trained[name])


def test_a_cluster_that_can_commit_nothing_stops_at_the_end_of_its_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub = InProcessHub("a", timeout_seconds=30)
    (alone,) = make("a", hub, min_clusters=2)
    alone.engine.start()
    rounds([alone], LEASED_ROUNDS)
    assert alone.engine.round == 0
    assert alone.drawn == list(range(LEASED_ROUNDS * ROUND))
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        going_on = pool.submit(rounds, [alone])
        (other,) = make("b", hub, min_clusters=2)
        other.engine.start()
        assert min(other.engine.draw()) == LEASED_ROUNDS * ROUND, "behind what is being trained"
        for _ in range(STEPS):
            other.engine.advance(tokens=STEP_SAMPLES, seconds=0.01)
        other.keep(other.engine.settle())
        assert "all samples on lease are trained: waiting" in caplog.text
        rounds([other])
        going_on.result()
    contributed = other.reports[0].leases.committed
    assert contributed["a"] == [(0, LEASED_ROUNDS * ROUND)], "nothing of it was thrown away"


def test_of_two_that_took_the_same_samples_unseen_only_the_first_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Moved:
        """An exchange that goes over from one hub to another."""

        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def __setattr__(self, name: str, value: object) -> None:
            if name == "inner":
                object.__setattr__(self, name, value)
            else:
                setattr(self.inner, name, value)

    settings = OuterSettings(local_steps=STEPS, delay=0)
    exchanges = [Moved(InProcessHub(name, timeout_seconds=30).exchange(name)) for name in "ab"]
    clusters = [Reader(settings, exchange) for exchange in exchanges]  # type: ignore[arg-type]
    for cluster in clusters:
        cluster.engine.start()
    hub = InProcessHub("ab", timeout_seconds=30)
    for exchange, name in zip(exchanges, "ab", strict=True):
        exchange.inner = hub.exchange(name)
    rounds(clusters)
    assert clusters[0].drawn == clusters[1].drawn
    assert clusters[0].reports[0].participants == ("a",)
    assert f"{ROUND} tokens trained here since the last exchange are left out" in caplog.text
    for name, value in clusters[1].weights().items():
        assert torch.equal(value, clusters[1].engine.theta[name])
    rounds(clusters, 2)
    assert clusters[0].reports[-1].participants == ("a", "b")
    assert_one_fate(clusters)


def test_samples_of_a_pseudo_gradient_that_was_not_finite_are_trained_again() -> None:
    clusters = make("ab", delay=1)
    together(clusters, lambda cluster: cluster.engine.start())
    rounds(clusters)
    with torch.no_grad():
        next(clusters[1].model.parameters()).fill_(float("nan"))
    rounds(clusters)
    clusters[1].optimizer.state.clear()
    rounds(clusters, LEASED_ROUNDS)
    assert clusters[1].engine.rounds_left_out == 1
    for cluster in clusters:
        cluster.engine.wait_for_flight(30)
    together(clusters, lambda cluster: [cluster.keep(r) for r in cluster.engine.finish()])
    assert_one_fate(clusters)
    times, _ = committed(clusters)
    assert set(clusters[1].drawn) <= times.keys()
    assert len(clusters[1].drawn) == len(set(clusters[1].drawn)) + ROUND


def test_a_round_that_fails_keeps_its_tokens_and_samples_for_the_next() -> None:
    clusters = make("ab", timeout_seconds=0.1)
    together(clusters, lambda cluster: cluster.engine.start())
    rounds(clusters)
    real = [cluster.engine.averager.average for cluster in clusters]

    def fail(*arguments: object) -> None:
        raise ExchangeError("the link is cut")

    for cluster in clusters:
        cluster.engine.averager.average = fail  # type: ignore[assignment, method-assign]
    rounds(clusters)
    assert [cluster.engine.round for cluster in clusters] == [1, 1]
    for cluster, average in zip(clusters, real, strict=True):
        cluster.engine.averager.average = average  # type: ignore[method-assign]
    rounds(clusters)
    assert [cluster.engine.round for cluster in clusters] == [2, 2]
    assert clusters[0].reports[-1].tokens_total == 2 * 3 * ROUND
    assert_one_fate(clusters)


def test_clusters_that_have_diverged_stop_with_both_digests() -> None:
    clusters = make("ab", timeout_seconds=0.1)
    together(clusters, lambda cluster: cluster.engine.start())
    rounds(clusters)
    next(iter(clusters[1].engine.theta.values())).view(-1)[0] += 1e-6
    clusters[1].engine._round.rehash()
    with pytest.raises(ExchangeRefused) as refusal:
        rounds(clusters)
    assert "clusters a and b hold different shared states after round 1" in str(refusal.value)
    for cluster in clusters:
        assert cluster.engine._keeper.shared_digest() in str(refusal.value)


def test_a_cluster_that_has_diverged_takes_over_what_most_hold_when_so_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clusters = make("abc", on_divergence="resync")
    together(clusters, lambda cluster: cluster.engine.start())
    rounds(clusters)
    # The first: more hold the others' state, though its name comes first.
    next(iter(clusters[0].engine.theta.values())).view(-1)[0] += 1e-6
    clusters[0].engine._round.rehash()
    rounds(clusters)
    assert "the shared state here had diverged after round 1" in caplog.text
    assert clusters[0].reports[-1].participants == ("b", "c")
    rounds(clusters)
    assert clusters[0].reports[-1].participants == ("a", "b", "c")
    assert len({cluster.reports[-1].shared_digest for cluster in clusters}) == 1
    assert_one_fate(clusters)
