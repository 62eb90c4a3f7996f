"""What a run's lines come down to, on made-up lines."""

import pytest

from dsx.bench.link.rows import measure
from dsx.errors import LaunchError
from dsx.tracking.events import InnerEvent
from tests.bench.tiny import NothingCounted


def steps(*times: float) -> list[InnerEvent]:
    """Steps of 10 tokens that end at these times."""
    ends = [*zip((0.0, *times), times, strict=False)]
    return [
        InnerEvent(
            cluster="c0",
            time=end,
            step=number,
            round=0,
            loss=1.0,
            lr=0.1,
            grad_norm=1.0,
            tokens=10 * number,
            tokens_per_second=10 / (end - begin),
        )
        for number, (begin, end) in enumerate(ends, 1)
    ]


@pytest.mark.parametrize("times", [(1, 2, 3, 4), (1, 4, 8, 8.5), (1, 1.5, 9, 10)])
def test_few_steps_of_any_length_can_be_measured(times: tuple[float, ...]) -> None:
    row = measure("allreduce", steps(*times), 0.0, NothingCounted(), 2)
    assert row["measured_steps"] >= 1
    assert row["tokens_per_second"] == pytest.approx(
        10 * row["measured_steps"] / row["measured_seconds"]
    )
    assert row["step_seconds"] > 0


def test_a_single_step_is_too_few() -> None:
    with pytest.raises(LaunchError, match="too short to measure"):
        measure("allreduce", steps(1.0), 0.0, NothingCounted(), 2)
