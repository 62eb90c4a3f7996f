"""Whom a cluster refuses to exchange with."""

import pytest
import torch

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.outer.header import Header, check_headers


def header(**changes: object) -> Header:
    values: dict = {
        "identity": "same",
        "round": 3,
        "met": 7,
        "shared_digest": "d",
        "starting": False,
        "tokens": 10,
        "step_seconds": 0.1,
        "exchange_seconds": 0.2,
        "measured_rank": 3.5,
        "step": 60,
    }
    return Header(**(values | changes))


def test_a_header_survives_the_wire() -> None:
    assert Header.from_bytes(header().to_bytes(), "a") == header()


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"\xff\x00", b'{"protocol": 1}', b"[" * 4000, b"x" * 10_000]
)
def test_bytes_that_are_no_header_are_refused_by_the_senders_name(payload: bytes) -> None:
    message = torch.tensor(list(payload), dtype=torch.uint8)
    with pytest.raises(ExchangeError, match="cluster far"):
        Header.from_bytes(message, "far")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"shared_digest": "e"}, "different shared weights after round 3"),
    ],
)
def test_a_cluster_of_another_run_is_refused_by_name(changes: dict, reason: str) -> None:
    with pytest.raises(ExchangeRefused, match=reason) as refusal:
        check_headers([header(), header(**changes)], ("here", "there"))
    assert "there" in str(refusal.value)


def test_a_cluster_at_an_older_round_may_hold_other_weights() -> None:
    check_headers([header(), header(round=1, shared_digest="e")], ("here", "there"))
