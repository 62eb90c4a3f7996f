"""The in-process hub."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsx.errors import ExchangeError
from dsx.exchange.in_process import InProcessHub


def message(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def test_everybody_receives_what_each_sent_to_it_and_bytes_are_counted() -> None:
    names = ("a", "b", "c")
    hub = InProcessHub(names, timeout_seconds=10)

    def round_of(name: str) -> list[str]:
        exchange = hub.exchange(name)
        membership = exchange.join(10)
        received = exchange.all_to_all([message(name + to) for to in membership.clusters], 2)
        return [bytes(payload.numpy()).decode() for payload in received]

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(round_of, names))
    assert got == [["aa", "ba", "ca"], ["ab", "bb", "cb"], ["ac", "bc", "cc"]]
    assert hub.exchange("a").traffic.sent == hub.exchange("a").traffic.received == 4


def test_a_peer_that_leaves_in_the_middle_of_a_round_is_an_error_with_its_name() -> None:
    hub = InProcessHub(("a", "b"), timeout_seconds=10)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: hub.exchange(name).join(10), ("a", "b")))
    hub.exchange("b").close()
    with pytest.raises(ExchangeError, match="cluster b left"):
        hub.exchange("a").all_to_all([message("x"), message("y")], 1)


def test_a_join_goes_on_without_members_that_left() -> None:
    hub = InProcessHub(("a", "b"), timeout_seconds=10)
    hub.exchange("b").close()
    assert hub.exchange("a").join(10).clusters == ("a",)


def test_a_peer_that_never_comes_is_an_error_and_not_a_hang() -> None:
    hub = InProcessHub(("a", "b"), timeout_seconds=0.05)
    with pytest.raises(ExchangeError, match=r"did not come within 0\.05 s"):
        hub.exchange("a").join(10)
