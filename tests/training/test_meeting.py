"""A rank's way to the other clusters: errors that every rank tells alike, and who can listen."""

import socket
from typing import Any

import psutil
import pytest

from dsx.errors import ExchangeError, SettingsError
from dsx.exchange.coordinator import Coordinator
from dsx.training.meeting import meet, open_store


class Told:
    """The agreement of one rank that hears what rank 0 has said, or speaks for the cluster."""

    def __init__(self, heard: Any = None) -> None:
        self.heard = heard
        """What rank 0 has said first."""
        self._repeats = heard is not None

    def broadcast(self, decision: Any = None) -> Any:
        if self._repeats:
            return self.heard
        self.heard = self.heard or decision
        return decision

    def gather(self, value: Any) -> list[Any]:
        return [value]


def call(coordinator: str, told: Told, rank: int = 0, bind: str | None = None) -> Any:
    return meet("c0", coordinator, bind, rank, 2, told, 5.0, connect_seconds=1.0)  # type: ignore[arg-type]


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_all_ranks_tell_that_there_is_no_coordinator_and_how_to_start_one() -> None:
    said = r"http://127\.0\.0\.1:\d+ can't be reached \(.*refused.*start one with `dsx coordinator"
    first = Told()
    with pytest.raises(ExchangeError, match=said):
        call(f"http://127.0.0.1:{unused_port()}", first)
    with pytest.raises(ExchangeError, match=said):
        call("http://127.0.0.1:1", Told(first.heard), rank=1)


@pytest.mark.parametrize("url", ["127.0.0.1:29510", "http://127.0.0.1", "http://host:port", "x"])
def test_a_coordinator_that_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(SettingsError, match=r"--coordinator is .*like http://127\.0\.0\.1:29510"):
        call(url, Told())


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with Coordinator("127.0.0.1:0") as coordinator:
        url = coordinator.address
        with pytest.raises(ExchangeError, match=r"can't listen on 203\.0\.113\.5 .*--address"):
            call(url, Told(), bind="203.0.113.5")


def test_what_a_cluster_opens_listens_on_its_own_address_alone() -> None:
    with Coordinator("127.0.0.1:0") as coordinator:
        before = listening()
        meeting = call(coordinator.address, Told())
        opened = listening() - before
        meeting.exchange.close()
    assert meeting.store is not None
    assert ("127.0.0.1", meeting.store.port) in opened
    assert {address for address, _ in opened} == {"127.0.0.1"}
    assert len(opened) == 1  # The store.


def test_the_store_serves_whoever_reaches_its_address() -> None:
    from torch.distributed import TCPStore

    store = open_store("127.0.0.1")
    TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False).set("key", "value")
    assert store.get("key") == b"value"


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
