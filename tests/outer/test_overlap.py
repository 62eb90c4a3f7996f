"""Delays and own shares."""

from dsx.outer.overlap import DelayClock, own_share


def test_fixed_delays_are_kept_and_round_is_the_whole_round() -> None:
    assert DelayClock(0).steps(20) == 0
    assert DelayClock(4).steps(20) == 4
    assert DelayClock(30).steps(20) == 20
    assert DelayClock("round").steps(20) == 20


def test_an_automatic_delay_starts_at_a_fifth_and_follows_the_slowest_recent_exchange() -> None:
    clock = DelayClock("auto")
    assert clock.steps(20) == 4
    clock.observe(exchange_seconds=0.8, step_seconds=0.1)
    assert clock.steps(20) == 10
    for _ in range(2):
        clock.observe(exchange_seconds=0.08, step_seconds=0.1)
        assert clock.steps(20) == 10
    clock.observe(exchange_seconds=0.08, step_seconds=0.1)
    assert clock.steps(20) == 1
    clock.observe(exchange_seconds=100.0, step_seconds=0.1)
    assert clock.steps(20) == 20


def test_an_automatic_delay_decides_the_same_after_a_restart() -> None:
    clock, fresh = DelayClock("auto"), DelayClock("auto")
    clock.observe(0.3, 0.1)
    fresh.load_state_dict(clock.state_dict())
    assert fresh.steps(20) == clock.steps(20) == 4


def test_own_shares_follow_their_definition() -> None:
    assert own_share("none", 0.7, 0.5) == 0.0
    assert own_share("all", 0.7, 0.5) == 1.0
    assert own_share("mean", 0.7, 0.5) == 0.35
