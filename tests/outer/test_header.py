"""Whom a cluster refuses to exchange with."""

import pytest
import torch
from pydantic import ValidationError

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.outer.header import Header, check_headers, find_newest


def header(**changes: object) -> Header:
    values: dict = {
        "identity": "same",
        "round": 3,
        "met": 7,
        "began": 1,
        "shared_digest": "d",
        "starting": False,
        "tokens": 10,
        "step_seconds": 0.1,
        "exchange_seconds": 0.2,
        "measured_rank": 3.5,
        "step": 60,
        "step_samples": 4,
        "trained": [(0, 40)],
        "claim": [],
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


def test_another_protocol_is_refused_by_the_clusters_name() -> None:
    with pytest.raises(ExchangeRefused, match="cluster there speaks protocol 99"):
        check_headers([header(), header(protocol=99)], ("here", "there"), 0)


@pytest.mark.parametrize(
    ("starting", "own", "leaves"),
    [
        ("nobody", 0, False),
        ("nobody", 1, False),
        ("nobody", 2, True),
        ("old", 0, True),
        ("fresh", 0, False),
    ],
)
def test_a_run_that_was_started_afresh_neither_gives_nor_loses_its_state(
    starting: str, own: int, leaves: bool
) -> None:
    names = ("old", "new", "fresh")
    headers = [
        header(starting=starting == "old"),
        header(round=0, began=9, starting=True),
        header(round=8, began=9, starting=starting == "fresh"),
    ]
    said = r"clusters old \(at round 3\) and fresh \(at round 8\) are of different runs: fresh was"
    with pytest.raises(ExchangeError, match=said) as told:
        check_headers(headers, names, own)
    assert isinstance(told.value, ExchangeRefused) == leaves
    check_headers(headers[:2], names[:2], 0)


@pytest.mark.parametrize("ranges", [[(5, 5)], [(-1, 2)], [(3, 1)]])
@pytest.mark.parametrize("key", ["trained", "claim"])
def test_ranges_that_are_none_are_refused(key: str, ranges: object) -> None:
    with pytest.raises(ValidationError, match="is no range of samples"):
        header(**{key: ranges})


def test_clusters_that_have_diverged_are_refused_with_both_digests() -> None:
    headers = [header(), header(round=1, shared_digest="old"), header(shared_digest="e")]
    with pytest.raises(ExchangeRefused, match=r"after round 3 \(digests d and e\)") as refusal:
        find_newest(headers, ("here", "late", "there"), "stop")
    assert "clusters here and there" in str(refusal.value)


def test_the_newest_state_is_that_of_the_last_round_and_there_of_the_last_meeting() -> None:
    headers = [
        header(round=2, met=9, shared_digest="a"),
        header(),
        header(met=4, shared_digest="c"),
        header(),
    ]
    assert find_newest(headers, ("a", "b", "c", "d"), "stop") == (1, [0, 2])


@pytest.mark.parametrize(
    ("digests", "expected"),
    [("ab", (0, [1])), ("abb", (1, [0])), ("aabb", (0, [2, 3])), ("aaa", (0, []))],
)
def test_of_diverged_clusters_the_state_of_the_more_goes_on(
    digests: str, expected: tuple[int, list[int]]
) -> None:
    headers = [header(shared_digest=digest) for digest in digests]
    assert find_newest(headers, tuple("abcd"[: len(digests)]), "resync") == expected
