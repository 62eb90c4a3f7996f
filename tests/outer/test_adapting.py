"""Controllers inside of the engine: all clusters decide alike, and a resumed one as well."""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pydantic import ValidationError

from dsx.exchange.in_process import InProcessHub
from dsx.outer.snapshot import FlightRecord, Snapshot
from dsx.settings.dsx_block import OuterSettings
from tests.outer.adaptive import RULES, Adaptive, adaptive, settings_of, step
from tests.outer.lockstep import LOSSLESS, together
from tests.outer.test_snapshot import Gate, hold, release, through_text

STEPS = 60


def start(clusters: list[Adaptive]) -> None:
    together(clusters, lambda cluster: cluster.engine.start())


def finish(clusters: list[Adaptive]) -> None:
    ends = together(clusters, lambda cluster: cluster.engine.finish())
    for cluster, reports in zip(clusters, ends, strict=True):
        cluster.reports.extend(reports)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [0, 2, "round", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_all_clusters_decide_the_same_in_the_same_round(rule: str, delay: int | str) -> None:
    clusters = adaptive(settings_of(rule, delay=delay), 3)
    start(clusters)
    for _ in range(STEPS):
        step(clusters)
    finish(clusters)
    first, *others = clusters
    changing = [
        local_steps if rule != "energy" else rank for _, local_steps, rank, _ in first.decided()
    ]
    assert len(set(changing[:-1])) > 1
    for other in others:
        assert other.decided() == first.decided()
        assert [r.shared_digest for r in other.reports] == [r.shared_digest for r in first.reports]
        assert other.engine.state.progress == first.engine.state.progress
    assert first.engine.state.progress.steps == first.engine.steps.step == STEPS
    assert sum(report.local_steps for report in first.reports) == STEPS


def test_a_rank_decided_in_one_round_is_used_two_rounds_later_with_its_steps() -> None:
    clusters = adaptive(settings_of("paper", delay=2), 2)
    start(clusters)
    for _ in range(STEPS):
        step(clusters)
    finish(clusters)
    used = {r.round: (r.local_steps, r.rank) for r in clusters[0].reports[:-1]}
    assert len(set(used.values())) > 1
    later = [round_ for round_ in used if round_ > min(used) + 1]
    assert {r: used[r] for r in later} == {r: clusters[1].chosen[r - 2] for r in later}


def flight(snapshot: Snapshot) -> FlightRecord | None:
    assert snapshot.record is not None
    return snapshot.record.flight


class Saved:
    """A cluster at one moment."""

    def __init__(self, cluster: Adaptive) -> None:
        self.snapshot: Snapshot = through_text(cluster.engine.snapshot())
        self.model = copy.deepcopy(cluster.model.state_dict())
        self.optimizer = copy.deepcopy(cluster.optimizer.state_dict())
        self.step = cluster.step

    def into(self, cluster: Adaptive) -> None:
        cluster.model.load_state_dict(self.model)
        cluster.optimizer.load_state_dict(self.optimizer)
        cluster.step = self.step
        cluster.engine.restore(self.snapshot)


@pytest.mark.parametrize(
    ("delay", "stop", "over"),
    [(0, 33, False), (2, 19, False), (2, 19, True), ("round", 33, True), ("auto", 40, False)],
)
@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_decides_as_one_that_never_stopped(
    rule: str, delay: int | str, stop: int, over: bool
) -> None:
    settings = settings_of(rule, delay=delay)
    straight = adaptive(settings)
    start(straight)
    for now in range(1, STEPS + 1):
        step(straight)
        if now == stop:
            boundary = straight[0].engine.steps.boundary
            flies = flight(straight[0].engine.snapshot()) is not None
    finish(straight)
    assert flies == (delay != 0) or stop - boundary >= 2

    stopped = adaptive(settings)
    start(stopped)
    for now in range(1, stop + 1):
        if now == boundary and flies:
            hold(stopped)
        step(stopped)
    if over:
        release(stopped)
    saved = [Saved(cluster) for cluster in stopped]
    if flies:
        assert {flight(state.snapshot).outcome is not None for state in saved} == {over}  # type: ignore[union-attr]
    release(stopped)
    finish(stopped)
    resumed = adaptive(settings)
    for cluster, state in zip(resumed, saved, strict=True):
        state.into(cluster)
    start(resumed)
    together(resumed, lambda cluster: cluster.engine.go_on())
    for _ in range(stop, STEPS):
        step(resumed)
    finish(resumed)
    for one, other in zip(straight, resumed, strict=True):
        count = len(other.reports)
        assert count > 2
        assert other.decided() == one.decided()[-count:]
        assert [r.shared_digest for r in other.reports] == [
            r.shared_digest for r in one.reports[-count:]
        ]
        one.engine.state.progress.met = other.engine.state.progress.met
        assert other.engine.state.progress == one.engine.state.progress
        assert other.engine.steps == one.engine.steps


@pytest.mark.parametrize("rule", RULES)
def test_a_cluster_that_comes_later_adopts_what_the_others_have_decided(rule: str) -> None:
    settings = settings_of(rule, delay=2)
    hub = InProcessHub(["a", "b"], timeout_seconds=30)
    clusters = [Adaptive(settings, Gate(hub.exchange(name)), i) for i, name in enumerate("ab")]  # type: ignore[arg-type]
    start(clusters)
    while clusters[0].engine.round < 9:
        step(clusters)
    # Nothing is on its way while it comes, so that it is in the very next round.
    hold(clusters)
    enters = clusters[0].engine.round + 1
    late = Adaptive(settings, hub.exchange("late"), 2)
    release(clusters)
    with ThreadPoolExecutor(1) as pool:
        present = pool.submit(late.engine.start)
        # By what has arrived: the exchange's thread counts a round before it has decided.
        while clusters[0].reports[-1].round < enters:
            step(clusters)
        assert present.result() == ("a", "b", "late")
    others = clusters[0].engine
    assert late.engine.state.progress.model_dump(exclude={"delays"}) == (
        others.state.progress.model_dump(exclude={"delays"})
    )
    # The others have begun the round already that it enters, or come to its end.
    assert late.engine.steps.step == others.state.progress.steps
    assert late.engine.steps.nominal == others.state.progress.local_steps
    for _ in range(others.steps.step - late.engine.steps.step):
        late.inner_step()
    clusters.append(late)
    while clusters[0].reports[-1].round < 16:
        step(clusters)
    finish(clusters)
    decided = clusters[0].decided()
    assert late.reports[-1].participants == ("a", "b", "late")
    assert late.decided() == decided[-len(late.reports) :]
    assert late.reports[-1].shared_digest == clusters[0].reports[-1].shared_digest


@pytest.mark.parametrize("delay", [0, 2, "round", "auto"])
@pytest.mark.parametrize("own_share", ["none", "all", "mean"])
def test_every_inner_step_is_reported_exactly_once_while_rounds_change(
    delay: int | str, own_share: str
) -> None:
    """With inner SGD on constant gradients every step moves by a known amount."""

    class Constant(Adaptive):
        def train(self, batch: object = None) -> None:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(2.0**-10)
            self.step += 1

    averaging = {"lr": 1.0, "momentum": 0.0, "compression": LOSSLESS}
    settings = settings_of("link", delay=delay, own_share=own_share, **averaging)
    hub = InProcessHub(["c0", "c1"], timeout_seconds=30)
    clusters: list[Adaptive] = [Constant(settings, hub.exchange(f"c{i}"), i) for i in range(2)]
    before = clusters[0].weights()
    start(clusters)
    for _ in range(STEPS):
        step(clusters)
    finish(clusters)
    assert len({report.local_steps for report in clusters[0].reports[:-1]}) > 1
    for name, value in clusters[1].engine.theta.items():
        torch.testing.assert_close(
            before[name] - value, torch.full_like(value, STEPS * 2.0**-10), rtol=0, atol=2e-6
        )
    assert clusters[0].reports[-1].tokens_total == 2 * STEPS * 4


@pytest.mark.parametrize("delay", [0, 4, "round", "auto"])
def test_balanced_clusters_of_unlike_pace_do_unlike_steps_and_end_together(
    delay: int | str,
) -> None:
    adapt = {"balanced": True, "local_steps": "fixed"}
    settings = OuterSettings.model_validate(
        {"local_steps": 12, "delay": delay, "start_clusters": 3, "adapt": adapt}
    )
    clusters = adaptive(settings, 3)
    total = 100

    def whole(cluster: Adaptive) -> None:
        engine = cluster.engine
        engine.start()
        while engine.steps.step < total:
            expected = engine.steps.next_step
            cluster.inner_step()
            assert engine.steps.step == expected
            cluster.keep(engine.settle())
        cluster.reports.extend(engine.finish())

    together(clusters, whole)  # type: ignore[arg-type]
    # Steps of 1, 2 and 3 / 64 s, known after the first round, in force from the third on.
    for cluster, own in zip(clusters, (12, 6, 4), strict=True):
        steps = [report.local_steps for report in cluster.reports]
        usual = Counter(steps[2:-1])
        assert set(usual) == {own}
        assert cluster.engine.steps.made == sum(steps)
        assert cluster.engine.state.progress.steps >= total
    first = clusters[0]
    assert first.engine.steps.made == total
    assert all(report.participants == ("c0", "c1", "c2") for report in first.reports)
    # Weighted by tokens: what each one trained is in the sum of all.
    made = sum(cluster.engine.steps.made for cluster in clusters)
    assert first.reports[-1].tokens_total == 4 * made
    assert len({cluster.reports[-1].shared_digest for cluster in clusters}) == 1


@pytest.mark.parametrize(
    ("values", "key", "advice"),
    [
        ({"adapt": {"local_steps": "paper"}}, "adapt.local_steps.type", "set `adapt.rank` to"),
        ({"adapt": {"rank": "paper"}}, "adapt.rank.type", 'use "lowrank" there'),
        (
            {"adapt": {"local_steps": {"type": "link", "min": 30}}},
            "local_steps",
            "from 30 to 500; start inside",
        ),
        (
            {"adapt": {"local_steps": {"type": "link", "min": 30, "max": 20}}},
            "min",
            r"more than `max` \(20\); swap them",
        ),
        (
            {
                "adapt": {"rank": "paper"},
                "compression": {
                    "matrices": {"type": "lowrank", "rank": 4},
                    "embeddings": {"type": "lowrank", "rank": 8},
                },
            },
            "compression.embeddings.rank",
            "make them equal",
        ),
        (
            {
                "adapt": {"rank": {"type": "paper", "min": 9}},
                "compression": {"matrices": {"type": "lowrank", "rank": 4}},
            },
            "adapt.rank.min",
            "use at most 4",
        ),
        ({"adapt": {"rank": "energy"}}, "adapt.rank.energy.budget_bytes", "Field required"),
    ],
)
def test_rules_that_do_not_fit_are_refused(values: dict, key: str, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice) as refusal:
        OuterSettings.model_validate(values)
    assert key in str(refusal.value)
