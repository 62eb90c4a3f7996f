"""How a rank gets its end of the exchange between clusters."""

import logging
import socket
import ssl
import time
from dataclasses import dataclass

from torch.distributed import TCPStore

from dsx.errors import ExchangeError, ExchangeRefused, SettingsError
from dsx.exchange.address import read_coordinator
from dsx.exchange.authenticated import AuthenticatedExchange
from dsx.exchange.interface import Council, Exchange
from dsx.exchange.relay import Relay, server_name, tls_context
from dsx.exchange.secret import RunSecret
from dsx.exchange.torchft import ClusterAddress, TorchftExchange

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""How long a cluster waits for a coordinator that doesn't answer yet."""
_RETRY_SECONDS = 0.5
_PLAIN_QUESTION = b"GET /status HTTP/1.1\r\nHost: coordinator\r\nConnection: close\r\n\r\n"


@dataclass
class Meeting:
    """A rank's end of the exchange, and on rank 0 what has to live as long as that.

    Whoever uses the exchange closes it; then this.
    """

    exchange: Exchange
    store: TCPStore | None
    relay: Relay | None

    def close(self) -> None:
        """Let go of what the exchange needed."""
        if self.relay is not None:
            self.relay.close()


def meet(
    cluster: str,
    coordinator: str,
    bind_host: str | None,
    rank: int,
    world_size: int,
    council: Council,
    timeout_seconds: float,
    secret: RunSecret | None = None,
    connect_seconds: float = CONNECT_SECONDS,
) -> Meeting:
    """Join the clusters that `coordinator` knows. Collective over the ranks of this cluster.

    Args:
        council: used by the exchange's thread alone from here on.
        bind_host: the address under which the other clusters reach rank 0 of this one; None takes
            the one from which the coordinator is reached, as all other ranks do.
        secret: of the run; all clusters and the coordinator have the same, or none.
        connect_seconds: longest wait for the coordinator.

    Raises:
        ExchangeError: the coordinator can't be reached, or `bind_host` can't be used. All ranks
            raise it alike.
        ExchangeRefused: the coordinator has another secret, or only one of the two has one.
        SettingsError: `coordinator` is no address.
    """
    store: TCPStore | None = None
    relay: Relay | None = None
    opened, problem = None, None
    if rank == 0:
        try:
            address = read_coordinator(coordinator)
            wait_for(address, connect_seconds, secret, cluster)
            host = bind_host or _own_address(address)
            store = open_store(host)
            opened = (host, store.port)
        except (ExchangeError, SettingsError) as error:
            # The others would only see that this rank has gone.
            problem = (type(error), str(error))
    opened, problem = council.broadcast((opened, problem))
    if opened is None:
        kind, message = problem
        raise kind(message)
    host, port = opened
    place = ClusterAddress(cluster, rank, world_size, host, port)
    # The other ranks may be on other machines, where rank 0's address is not to be had.
    own = host if rank == 0 else _own_address(read_coordinator(coordinator))
    if rank == 0 and secret is not None:
        relay = Relay(("127.0.0.1", 0), read_coordinator(coordinator), secret, cluster)
        coordinator = f"http://127.0.0.1:{relay.port}"
    exchange: Exchange
    exchange = TorchftExchange(place, coordinator, council, own, timeout_seconds, connect_seconds)
    if secret is not None:
        exchange = AuthenticatedExchange(exchange, secret)
    return Meeting(exchange, store, relay)


def wait_for(
    address: tuple[str, int], seconds: float, secret: RunSecret | None = None, cluster: str = "c0"
) -> None:
    """Return once a coordinator answers there, and lets this cluster in.

    Raises:
        ExchangeError: nothing answers for `seconds`.
        ExchangeRefused: it has another secret, or only one of the two has one.
    """
    deadline = time.monotonic() + seconds
    told = False
    where = "http://{}:{}".format(*address)
    while True:
        try:
            with socket.create_connection(address, timeout=max(1.0, seconds / 10)) as connection:
                _greet(connection, where, secret, cluster)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ExchangeError(
                    f"the coordinator at {where} can't be reached ({error}; tried for "
                    f"{seconds:g} s); start one with `dsx coordinator --bind HOST:PORT` and give "
                    "its address to --coordinator"
                ) from error
            if not told:
                log.warning("waiting for a coordinator at %s: %s", where, error)
                told = True
        time.sleep(_RETRY_SECONDS)


def _greet(connection: socket.socket, where: str, secret: RunSecret | None, cluster: str) -> None:
    """See that whoever listens is a coordinator with the same secret, or with none like this."""
    if secret is None:
        connection.sendall(_PLAIN_QUESTION)
        try:
            answer = connection.recv(5)
        except ConnectionError:
            answer = b""
        if answer != b"HTTP/":
            raise ExchangeRefused(
                f"the coordinator at {where} does not let in who has no run secret; give "
                "--secret-file FILE, with the secret that it was started with"
            )
        return
    try:
        context = tls_context(secret, server=False)
        context.wrap_socket(connection, server_hostname=server_name(cluster)).close()
    except ssl.SSLCertVerificationError as error:
        raise ExchangeRefused(
            f"the coordinator at {where} has another run secret than this cluster's "
            "--secret-file; copy the same file to both"
        ) from error
    except ssl.SSLEOFError:
        raise  # It ended in the middle of its greeting: worth another try.
    except ssl.SSLError as error:
        raise ExchangeRefused(
            f"the coordinator at {where} has no run secret ({error}); start it with `dsx "
            "coordinator --secret-file FILE`, and all clusters with the same"
        ) from error


def open_store(host: str) -> TCPStore:
    """A store that listens on `host` alone; torch's own listener takes all interfaces.

    Raises ExchangeError when `host` is no address of this machine.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ExchangeError(
            f"can't listen on {host} ({error}); give --address one of this machine under "
            "which the other clusters reach it"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _own_address(coordinator: tuple[str, int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks the system for the route.
            probe.connect(coordinator)
        except OSError as error:
            raise ExchangeError(
                "no route to the coordinator at http://{}:{}: {}".format(*coordinator, error)
            ) from error
        return str(probe.getsockname()[0])
