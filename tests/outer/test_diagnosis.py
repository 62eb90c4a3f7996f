"""Which rounds are warned about, and how often."""

import logging
import re

import pytest

from dsx.outer.diagnosis import Diagnosis
from dsx.outer.leases import Leases
from dsx.outer.report import RoundReport
from dsx.settings.dsx_block import OuterSettings


def report(**changes: object) -> RoundReport:
    values: dict = {
        "round": 1,
        "participants": ("a", "b"),
        "bytes_sent": 1,
        "bytes_received": 1,
        "exchange_seconds": 0.1,
        "blocked_seconds": 0.0,
        "local_steps": 20,
        "rank": 0,
        "delay": 4,
        "pseudo_gradient_norm": 1.0,
        "relative_error": 0.3,
        "residual_ratio": 0.5,
        "cosine": 0.7,
        "shared_digest": "d",
        "tokens_total": 10,
        "leases": Leases(),
    }
    return RoundReport(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "own_share", "advice"),
    [
        ({"relative_error": 0.96}, "all", "relative error is 0.96 .* more bits"),
        ({"cosine": 0.01}, "all", "cosine .* is 0.010 .* fewer dsx.outer.local_steps"),
        ({"cosine": -0.4}, "all", "cosine .* is -0.400"),
        ({"delay": 11}, "none", '11 inner steps late, in rounds of 20.* own_share to "all"'),
    ],
)
def test_a_round_out_of_its_bounds_is_warned_about_with_advice(
    changes: dict, own_share: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    diagnosis = Diagnosis(OuterSettings(own_share=own_share))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        (warning,) = diagnosis.look_at(report(**changes))
    assert caplog.messages == [warning]
    assert re.search(f"^round 1: .*{advice}", warning)


def test_a_sound_round_is_passed_over() -> None:
    diagnosis = Diagnosis(OuterSettings())
    assert diagnosis.look_at(report()) == []
    # Late, but own progress is kept; alone; sat the round out.
    assert diagnosis.look_at(report(delay=20)) == []
    assert diagnosis.look_at(report(participants=("a",), cosine=0.0)) == []
    assert diagnosis.look_at(report(cosine=0.0)) == []


def test_an_error_feedback_is_warned_about_when_it_is_large_and_grows() -> None:
    diagnosis = Diagnosis(OuterSettings())
    assert diagnosis.look_at(report(residual_ratio=2.0)) == []
    (warning,) = diagnosis.look_at(report(round=2, residual_ratio=3.5))
    assert "3.5 times the averaged pseudo-gradient and grows" in warning
    assert diagnosis.look_at(report(round=80, residual_ratio=3.4)) == []
    assert len(diagnosis.look_at(report(round=81, residual_ratio=3.6))) == 1


def test_a_warning_is_repeated_after_fifty_rounds_only() -> None:
    diagnosis = Diagnosis(OuterSettings())
    warned = [
        number
        for number in range(1, 120)
        if diagnosis.look_at(report(round=number, relative_error=0.99))
    ]
    assert warned == [1, 51, 101]
