"""Traffic that fills a line in both ways: `python -m dsx.bench.flood HOST` and `... HOST PORT`.

The first listens, prints its port, and sends back what it gets; the second sends without end.
"""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

_CHUNK = bytes(2**16)


class Flood:
    """Both ends as processes, between two places; a context manager.

    Args:
        near, far: words before the commands, as `SlowLink.inside` gives them.
        host: the near end's address.
    """

    def __init__(self, near: Sequence[str], far: Sequence[str], host: str) -> None:
        command = [sys.executable, "-m", "dsx.bench.flood", host]
        self._near = subprocess.Popen([*near, *command], stdout=subprocess.PIPE, text=True)
        assert self._near.stdout is not None
        self._far = subprocess.Popen([*far, *command, self._near.stdout.readline().strip()])

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._far, self._near):
            process.kill()
            process.wait()


def _listen(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with contextlib.suppress(ConnectionError):  # The other end was killed first.
            while got := connection.recv(len(_CHUNK)):
                connection.sendall(got)


def _send(host: str, port: int) -> None:
    connection = socket.create_connection((host, port))

    def drain() -> None:
        while connection.recv(len(_CHUNK)):
            pass

    threading.Thread(target=drain, daemon=True).start()
    while True:
        connection.sendall(_CHUNK)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _send(sys.argv[1], int(sys.argv[2]))
    else:
        _listen(sys.argv[1])
