"""The meeting point of the clusters: where it listens, and that it ends when told to."""

import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torchft.coordination import LighthouseClient

from dsx.errors import LaunchError
from dsx.exchange.coordinator import Coordinator

REPOSITORY = Path(__file__).parents[2]


def test_clusters_find_it_at_its_address():
    with Coordinator("127.0.0.1:0") as coordinator:
        assert coordinator.address == f"http://127.0.0.1:{coordinator.port}"
        client = LighthouseClient(coordinator.address, connect_timeout=timedelta(seconds=5))
        quorum = client.quorum("c0:x", timeout=timedelta(seconds=10))
    assert [member.replica_id for member in quorum.participants] == ["c0:x"]


@pytest.mark.parametrize("bind", ["127.0.0.1", ":29510", "127.0.0.1:port", "127.0.0.1:70000"])
def test_what_is_not_an_address_is_refused(bind: str):
    with pytest.raises(LaunchError, match=r"give HOST:PORT, for example 127\.0\.0\.1:29510"):
        Coordinator(bind)


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"can't listen on {bind}"):
            Coordinator(bind)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_serves_until_it_is_told_to_stop(
    number: signal.Signals,
):
    command = [sys.executable, "-m", "dsx.cli.main", "coordinator", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"coordinator at http://127\.0\.0\.1:(\d+)\n", line)
        assert found
        socket.create_connection(("127.0.0.1", int(found[1])), timeout=5).close()
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
