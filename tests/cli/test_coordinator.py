"""`dsx coordinator` as a process: what it says, and that it ends when told to."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.cli import main
from dsx.exchange.secret import RunSecret


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_ends_on_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dsx.cli.main", "coordinator", "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        assert "--coordinator" in line
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10).close()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_an_address_that_is_taken_or_elsewhere_is_told_with_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.main(["coordinator", "--bind", f"127.0.0.1:{port}"]) == 1
    assert "Address already in use" in capsys.readouterr().err
    RunSecret.create(tmp_path / "secret")
    secret = ["--secret-file", str(tmp_path / "secret")]
    assert main.main(["coordinator", "--bind", "203.0.113.5:0", *secret]) == 1
    assert "choose an address of this machine" in capsys.readouterr().err
    assert main.main(["coordinator", "--bind", "29510"]) == 2
    assert "give HOST:PORT with a port up to 65535" in capsys.readouterr().err
