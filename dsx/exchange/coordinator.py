"""The meeting point of the clusters: torchft's lighthouse inside this process.

It forms the quorum of every round and carries no training data. It is neither encrypted nor
authenticated, so it belongs on an address that only the clusters reach.
"""

import os
from types import TracebackType

from dsx.errors import LaunchError

# torchft reads this once, when it is imported; at its own default it tells every quorum.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.coordination import LighthouseServer

STRAGGLER_SECONDS = 600.0


class Coordinator:
    """A running coordinator; a context manager.

    Args:
        bind: HOST:PORT to listen on; port 0 takes a free one.
        straggler_seconds: how long a round that has enough clusters waits for those that are
            alive but have not finished their inner steps.

    Raises:
        LaunchError: `bind` is not an address of this machine, or is taken.
    """

    def __init__(self, bind: str, straggler_seconds: float = STRAGGLER_SECONDS) -> None:
        host, separator, port = bind.rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65535:
            raise LaunchError(
                f"--bind is {bind!r}; give HOST:PORT, for example 127.0.0.1:29510 (port 0 takes a "
                "free one)"
            )
        try:
            self._server = LighthouseServer(
                bind=bind, min_replicas=1, join_timeout_ms=round(straggler_seconds * 1000)
            )
        except Exception as error:
            raise LaunchError(
                f"the coordinator can't listen on {bind} ({error}); choose an address of this "
                "machine and a port that is free"
            ) from error
        self.port = int(self._server.address().rsplit(":", 1)[1])
        """The port that it listens on."""
        everywhere = host in ("0.0.0.0", "[::]")
        self.address = self._server.address() if everywhere else f"http://{host}:{self.port}"
        """What clusters are given as `--coordinator`."""

    def close(self) -> None:
        self._server.shutdown()

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
