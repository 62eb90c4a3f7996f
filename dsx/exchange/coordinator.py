"""The meeting point of the clusters: torchft's lighthouse inside this process.

It forms the quorum of every round and carries no training data. It neither encrypts nor asks who
is there: with a run secret it listens on the loopback address alone, behind a relay that does;
without one, this address has to be the loopback address, too.
"""

import os
import socket
from types import TracebackType
from typing import TYPE_CHECKING

from dsx.errors import LaunchError
from dsx.exchange.address import Address, read_bind
from dsx.exchange.relay import Relay
from dsx.exchange.secret import RunSecret, require_secret

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

_NEVER_MILLISECONDS = 24 * 3600 * 1000
"""How long a round waits for clusters that are there and do not ask: these are slow, and a slow one
is not left out. Clusters that wait have deadlines of their own."""


class Coordinator:
    """A running coordinator; a context manager.

    Args:
        bind: HOST:PORT to listen on; port 0 takes a free one.
        secret: of the run; who does not hold it reaches nothing.

    Raises:
        SettingsError: `bind` is no address, or others can reach it and there is no secret.
        LaunchError: it is not an address of this machine, or is taken.
    """

    def __init__(self, bind: str, secret: RunSecret | None = None) -> None:
        address = read_bind(bind)
        host = address[0]
        require_secret(secret, host, "--bind")
        self._relay: Relay | None = None
        try:
            _require_free(address)
        except OSError as error:
            raise _cannot_listen(bind, error) from error
        self._server = _lighthouse(bind if secret is None else "127.0.0.1:0")
        self.port = int(self._server.address().rsplit(":", 1)[1])
        """The port that it listens on."""
        if secret is not None:
            behind = ("127.0.0.1", self.port)
            try:
                self._relay = Relay(address, behind, secret)
            except OSError as error:
                self._server.shutdown()
                raise _cannot_listen(bind, error) from error
            self.port = self._relay.port
        named = socket.gethostname() if host in ("0.0.0.0", "::") else bind.rpartition(":")[0]
        self.address = f"http://{named}:{self.port}"
        """What clusters are given as `--coordinator`."""

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
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


def _require_free(address: Address) -> None:
    """Raises OSError where nothing can listen, before a library is imported that takes seconds."""
    family, _, _, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    socket.create_server(resolved[:2], family=family).close()


def _lighthouse(bind: str) -> "LighthouseServer":
    # torchft reads this once, when it is imported; at its own default it tells every quorum.
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    try:
        return LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=_NEVER_MILLISECONDS)
    except Exception as error:
        raise _cannot_listen(bind, error) from error


def _cannot_listen(bind: str, error: Exception) -> LaunchError:
    return LaunchError(
        f"the coordinator can't listen on {bind} ({error}); choose an address of this machine and "
        "a port that is free"
    )
