"""The way to the coordinator: open to who holds the run secret, and to nobody else."""

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.coordinator import Coordinator
from dsx.exchange.relay import Relay, tls_context
from dsx.exchange.secret import RunSecret
from dsx.training.meeting import wait_for

SECRET, OTHER = RunSecret(b"s" * 32), RunSecret(b"o" * 32)
QUESTION = b"GET /status HTTP/1.1\r\nHost: c\r\nConnection: close\r\n\r\n"


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator("127.0.0.1:0", secret=SECRET) as coordinator:
        yield coordinator


def ask(port: int) -> bytes:
    """What a plain HTTP question is answered with."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(QUESTION)
        answer = b""
        try:
            while data := connection.recv(4096):
                answer += data
        except ConnectionError:
            pass
        return answer


def refusals(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        told = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
        if len(told) >= count:
            return told
        time.sleep(0.01)
    raise AssertionError(f"{count} refusals were due")


def test_who_holds_the_secret_reaches_the_coordinator_through_two_relays(
    coordinator: Coordinator,
) -> None:
    own = Relay(("127.0.0.1", 0), ("127.0.0.1", coordinator.port), SECRET, "site-a")
    assert ask(own.port).startswith(b"HTTP/1.1 200")
    own.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", own.port), timeout=10)


def test_others_are_refused_by_name_and_told_once(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", coordinator.port)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert b"HTTP" not in ask(coordinator.port)
            with pytest.raises(ExchangeRefused, match="does not let in who has no run secret"):
                wait_for(address, 5.0, None)
            with pytest.raises(ExchangeRefused, match="has another run secret than this cluster"):
                wait_for(address, 5.0, OTHER, "site-c")
        told = refusals(caplog, 2)
    assert told == [
        "refused 127.0.0.1: it has no run secret",
        "refused cluster 'site-c' at 127.0.0.1: it has another run secret",
    ]
    wait_for(address, 5.0, SECRET, "site-a")


def test_who_shows_no_certificate_is_refused(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with caplog.at_level(logging.WARNING):
        plain = socket.create_connection(("127.0.0.1", coordinator.port), timeout=10)
        with context.wrap_socket(plain, server_hostname="spy") as connection:
            try:
                connection.sendall(QUESTION)
                answer = connection.recv(4096)
            except OSError:
                answer = b""
            assert answer == b""
        assert refusals(caplog, 1) == ["refused cluster 'spy' at 127.0.0.1: it has no run secret"]


def test_a_coordinator_without_a_secret_is_told_as_that() -> None:
    with Coordinator("127.0.0.1:0") as plain:
        wait_for(("127.0.0.1", plain.port), 5.0)
        with pytest.raises(ExchangeRefused, match="has no run secret"):
            wait_for(("127.0.0.1", plain.port), 5.0, SECRET)


def test_somebody_who_only_connects_does_not_keep_others_out(coordinator: Coordinator) -> None:
    address = ("127.0.0.1", coordinator.port)
    idle = [socket.create_connection(address) for _ in range(50)]
    wait_for(address, 5.0, SECRET)
    for connection in idle:
        connection.close()


def test_a_relay_without_a_coordinator_closes_and_finds_it_when_it_is_there_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    own = Relay(("127.0.0.1", 0), ("127.0.0.1", port), SECRET, "site-a")
    assert ask(own.port) == b""
    with pytest.raises(ExchangeError, match="can't be reached"):
        wait_for(("127.0.0.1", port), 0.1, SECRET)
    with Coordinator(f"127.0.0.1:{port}", secret=SECRET):
        assert ask(own.port).startswith(b"HTTP/1.1 200")
    own.close()


def test_a_cluster_finds_a_coordinator_that_was_restarted_at_its_address() -> None:
    from torchft.coordination import LighthouseClient

    with Coordinator("127.0.0.1:0", secret=SECRET) as first:
        port = first.port
        own = Relay(("127.0.0.1", 0), ("127.0.0.1", port), SECRET, "site-a")
        client = LighthouseClient(f"http://127.0.0.1:{own.port}", timedelta(seconds=10))
        client.heartbeat("site-a:1")
    with pytest.raises(RuntimeError, match="transport error"):
        client.heartbeat("site-a:1")
    with Coordinator(f"127.0.0.1:{port}", secret=SECRET):
        client.heartbeat("site-a:1")
        quorum = client.quorum("site-a:1", timedelta(seconds=10), store_address="here:1")
        assert [member.store_address for member in quorum.participants] == ["here:1"]
    own.close()


def test_both_ends_make_the_same_certificate_and_no_key_is_left_on_the_disk(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server, client = tls_context(SECRET, server=True), tls_context(SECRET, server=False)
    assert [c.get_ca_certs() for c in (server,)] == [c.get_ca_certs() for c in (client,)]
    assert client.minimum_version == ssl.TLSVersion.TLSv1_3
    assert [*tmp_path.iterdir()] == []
