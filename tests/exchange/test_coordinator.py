"""The meeting point of the clusters: where it listens, and that it ends when told to."""

import socket
from datetime import timedelta

import pytest
from torchft.coordination import LighthouseClient

from dsx.errors import LaunchError, SettingsError
from dsx.exchange.coordinator import Coordinator


def test_clusters_find_it_at_its_address():
    with Coordinator("127.0.0.1:0") as coordinator:
        assert coordinator.address == f"http://127.0.0.1:{coordinator.port}"
        client = LighthouseClient(coordinator.address, connect_timeout=timedelta(seconds=5))
        quorum = client.quorum("c0:x", timeout=timedelta(seconds=10))
    assert [member.replica_id for member in quorum.participants] == ["c0:x"]


@pytest.mark.parametrize("bind", ["127.0.0.1", ":29510", "127.0.0.1:port", "127.0.0.1:70000"])
def test_what_is_not_an_address_is_refused(bind: str):
    with pytest.raises(SettingsError, match="give HOST:PORT with a port up to 65535"):
        Coordinator(bind)


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"can't listen on {bind}"):
            Coordinator(bind)
