"""The rules for the inner steps of a round, on made-up times."""

import pytest

from dsx.outer.agreement import AloneAgreement
from dsx.outer.control import Control, Observed
from dsx.outer.state import Progress
from dsx.outer.steps import StepCounter
from dsx.outer.steps_control import balanced_steps, next_paces
from dsx.settings.dsx_block import OuterSettings


def decisions(settings: OuterSettings, times: list[tuple[float, float]]) -> list[int]:
    """H of the round after the next, after every commit with (exchange, step) seconds."""
    control = Control(settings, None)
    progress = Progress()
    control.prepare(progress, {}, AloneAgreement())
    taken = []
    for exchange, step in times:
        before = progress.next_local_steps
        control.decide(progress, Observed(exchange, step, [], {}, 0))
        assert progress.local_steps == before
        taken.append(progress.next_local_steps)
    return taken


def link(local_steps: int = 20, **rule: object) -> OuterSettings:
    return OuterSettings.model_validate(
        {"local_steps": local_steps, "adapt": {"local_steps": {"type": "link", **rule}}}
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize(("exchange", "step"), [(1.0, 0.1), (0.33, 0.01), (7.0, 0.25), (0.01, 1.0)])
def test_the_link_rule_finds_the_smallest_round_that_fits(
    share: float, exchange: float, step: float
) -> None:
    rule = link(local_steps=1000, share=share, min=1, max=1000)
    (*_, steps) = decisions(rule, [(exchange, step)] * 6)
    assert steps * step * share >= exchange * (1 - 1e-6)
    assert steps == 1 or (steps - 1) * step * share < exchange * (1 - 1e-6)


def test_the_link_rule_keeps_to_its_bounds() -> None:
    assert decisions(link(min=5, max=40), [(9.0, 0.01)] * 4)[-1] == 40
    assert decisions(link(min=5, max=40), [(0.001, 0.01)] * 4)[-1] == 5


def test_the_link_rule_waits_for_three_measurements_and_ignores_an_outlier() -> None:
    fast, slow = (0.1, 0.01), (50.0, 0.01)
    taken = decisions(link(), [slow, fast, fast, fast, slow, slow, slow])
    assert taken == [20, 20, 50, 50, 50, 50, 1000]


def test_jitter_does_not_move_a_round_about() -> None:
    times = [(0.1 * (1 + 0.08 * (-1) ** n), 0.01) for n in range(30)]
    steps = decisions(link(), times)
    assert set(steps[4:]) == {54}


def test_steps_stay_as_they_are_without_a_measurement() -> None:
    assert decisions(link(), [(0.0, 0.0)] * 5) == [20] * 5


def test_rounds_get_longer_on_a_slow_link_only_where_the_delay_follows_it_too() -> None:
    slow, fast = [(9.0, 0.1)] * 5, [(0.01, 0.1)] * 5
    assert decisions(OuterSettings(local_steps=7), slow)[-1] == 350  # 50 times 7; 450 are needed
    assert decisions(OuterSettings(local_steps=7), fast) == [7] * 5
    for delay in (0, 3, "round"):
        pinned = OuterSettings.model_validate({"local_steps": 7, "delay": delay})
        assert decisions(pinned, slow) == [7] * 5
    fixed = OuterSettings.model_validate({"local_steps": 7, "adapt": {"local_steps": "fixed"}})
    assert decisions(fixed, slow) == [7] * 5


def test_other_settings_than_before_change_a_restored_state() -> None:
    progress = Progress(local_steps=20, next_local_steps=30, rank=4, next_rank=3)
    Control(OuterSettings(local_steps=7, delay=1), None).prepare(progress, {}, AloneAgreement())
    assert (progress.local_steps, progress.next_local_steps) == (7, 7)
    assert (progress.rank, progress.next_rank) == (0, 0)
    progress = Progress(local_steps=20, next_local_steps=300)
    Control(link(max=100), None).prepare(progress, {}, AloneAgreement())
    assert (progress.local_steps, progress.next_local_steps) == (20, 100)


def test_a_slower_cluster_does_as_many_steps_as_fit_into_the_time_of_the_fastest() -> None:
    paces = {"a": 0.1, "b": 0.25, "c": 0.102, "d": 9.0}
    assert balanced_steps(20, paces, "a") == 20
    assert balanced_steps(20, paces, "b") == 8
    assert balanced_steps(20, paces, "c") == 20  # no more than jitter
    assert balanced_steps(20, paces, "d") == 1
    assert balanced_steps(20, paces, "new") == 20


def test_paces_are_smoothed_and_those_who_left_are_forgotten() -> None:
    assert next_paces({"a": 1.0, "gone": 5.0}, {"a": 2.0, "new": 3.0}) == {"a": 1.5, "new": 3.0}


def test_clusters_of_unlike_pace_meet_at_the_same_step_at_every_boundary() -> None:
    for nominal in range(1, 30):
        for own in range(1, nominal + 1):
            counter = StepCounter(boundary=100)
            counter.begin_round(nominal, own)
            seen = []
            while not counter.is_full:
                expected = counter.next_step
                counter.advance()
                assert counter.step == expected
                seen.append(counter.step)
            assert seen == sorted(set(seen))
            assert seen[-1] == 100 + nominal
            assert len(seen) == counter.made == own
