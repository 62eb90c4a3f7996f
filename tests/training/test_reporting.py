import logging
from types import SimpleNamespace

import pytest

from dsx.cluster.engine import StepResult
from dsx.outer.leases import Leases
from dsx.outer.report import RoundReport
from dsx.tracking.ledger import Ledger
from dsx.tracking.tracker import Tracker
from dsx.training import reporting
from dsx.training.reporting import Reporter


def report(number: int, *participants: str) -> RoundReport:
    return RoundReport(
        round=number,
        participants=participants,
        bytes_sent=1,
        bytes_received=1,
        exchange_seconds=0.1,
        blocked_seconds=0.1,
        local_steps=2,
        rank=0,
        delay=0,
        pseudo_gradient_norm=1.0,
        relative_error=0.0,
        residual_ratio=0.0,
        cosine=1.0,
        shared_digest="d",
        tokens_total=1,
        leases=Leases(),
    )


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_cluster_that_leaves_or_comes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(Tracker([]), Ledger(None, "a"), "a", "int4")
    for number, names in enumerate(["ab", "ab", "a", "a", "ac"], start=1):
        reporter.outer(report(number, *names))
    assert caplog.messages == [
        "round 3 was made without b; clusters now: a",
        "round 5 was made with c; clusters now: a, c",
    ]


def test_progress_is_told_at_most_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter(Tracker([]), Ledger(None, "a"), "a", "int4")
    reporter._steps = 1000
    for step, now in enumerate([50.0, 51.0, 59.9, 60.0, 69.0], start=1):
        monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda now=now: now))
        reporter.inner(step, 2, 0.1, StepResult(loss=7.5, grad_norm=1.0, seconds=0.5), 1000, 1)
    assert caplog.messages == [
        "step 1 of 1000, round 2: loss 7.5000, 2,000 tokens/s",
        "step 4 of 1000, round 2: loss 7.5000, 2,000 tokens/s",
    ]


def test_the_held_out_loss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Reporter(Tracker([]), Ledger(None, "a"), "a", "int4").evaluation(40, 2, 7.25, shared=True)
    assert caplog.messages == ["held-out loss of the shared weights: 7.2500 (step 40, round 2)"]
