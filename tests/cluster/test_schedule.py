"""The learning rate follows its closed formula."""

import math

import pytest

from dsx.cluster.schedule import learning_rate, schedule_factor
from tests.cluster.reference import settings_for


def factor(step: int, kind: str, warmup: int = 10, steps: int = 110, ratio: float = 0.1) -> float:
    return schedule_factor(step, kind=kind, steps=steps, warmup_steps=warmup, min_ratio=ratio)


def test_warm_up_is_linear_and_learns_from_the_first_step_on() -> None:
    for kind in ("cosine", "linear", "constant"):
        assert [factor(s, kind) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
        assert factor(0, kind, warmup=0) == 1.0


def test_decay_follows_its_formula() -> None:
    for step in range(10, 110):
        progress = (step - 10) / 100
        assert factor(step, "constant") == 1.0
        assert factor(step, "linear") == pytest.approx(1 - 0.9 * progress)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        assert factor(step, "cosine") == pytest.approx(cosine)


def test_steps_beyond_the_end_keep_the_last_rate() -> None:
    assert factor(110, "cosine") == factor(500, "cosine") == pytest.approx(0.1)
    assert factor(500, "linear") == pytest.approx(0.1)


def test_no_step_of_a_run_is_wasted_at_rate_zero() -> None:
    for kind in ("cosine", "linear"):
        assert min(factor(step, kind, ratio=0.0) for step in range(110)) > 0
        assert factor(0, kind, warmup=0, steps=1, ratio=0.0) == 1.0
        assert factor(0, kind, warmup=5, steps=5, ratio=0.0) > 0


def test_the_settings_give_the_peak_and_the_shape() -> None:
    settings = settings_for(1, 1, 1)  # lr 1e-2, 20 steps, 3 of warm-up, cosine to 0.1
    assert learning_rate(0, settings) == pytest.approx(1e-2 / 3)
    assert learning_rate(2, settings) == learning_rate(3, settings) == pytest.approx(1e-2)
    assert learning_rate(20, settings) == pytest.approx(1e-3)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="'step': use cosine, linear or constant"):
        factor(50, "step")
