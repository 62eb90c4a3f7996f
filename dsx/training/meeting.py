"""How a rank gets its end of the exchange between clusters."""

import logging
import socket
import time
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from dsx.cluster.agreement import ClusterAgreement
from dsx.errors import ExchangeError
from dsx.exchange.torchft import ClusterAddress, TorchftExchange

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
"""How long a cluster waits for a coordinator that doesn't answer yet."""
_RETRY_SECONDS = 0.5


def meet(
    cluster: str,
    coordinator: str,
    bind_host: str | None,
    rank: int,
    world_size: int,
    agreement: ClusterAgreement,
    timeout_seconds: float,
    connect_seconds: float = CONNECT_SECONDS,
) -> tuple[TorchftExchange, TCPStore | None]:
    """Join the clusters that `coordinator` knows. Collective over the ranks of this cluster.

    Args:
        bind_host: the address under which the other clusters reach rank 0 of this one; None takes
            the one from which the coordinator is reached, as all other ranks do.
        connect_seconds: longest wait for the coordinator.

    Returns:
        the exchange, and on rank 0 the store that has to live as long as it.

    Raises:
        ExchangeError: the coordinator can't be reached, or `bind_host` can't be used. All ranks
            raise it alike.
    """
    store: TCPStore | None = None
    opened, problem = None, None
    if rank == 0:
        try:
            address = read_address(coordinator)
            wait_for(address, connect_seconds)
            host = bind_host or _own_address(address)
            store = open_store(host)
            opened = (host, store.port)
        except ExchangeError as error:
            # The others would only see that this rank has gone.
            problem = str(error)
    opened, problem = agreement.broadcast((opened, problem))
    if opened is None:
        raise ExchangeError(problem)
    host, port = opened
    place = ClusterAddress(cluster, rank, world_size, host, port)
    # The other ranks may be on other machines, where rank 0's address is not to be had.
    own = host if rank == 0 else _own_address(read_address(coordinator))
    return TorchftExchange(place, coordinator, own, timeout_seconds, connect_seconds), store


def read_address(coordinator: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises ExchangeError."""
    parts = urlsplit(coordinator)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or host is None or port is None:
        raise ExchangeError(
            f"--coordinator is {coordinator!r}; give an address like http://127.0.0.1:29510"
        )
    return host, port


def wait_for(address: tuple[str, int], seconds: float) -> None:
    """Return once something listens there. Raises ExchangeError after `seconds`."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            socket.create_connection(address, timeout=max(1.0, seconds / 10)).close()
            return
        except OSError as error:
            where = "http://{}:{}".format(*address)
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


def open_store(host: str) -> TCPStore:
    """A store that listens on `host` alone; torch's own listener takes all interfaces.

    Raises ExchangeError when `host` is no address of this machine.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ExchangeError(
            f"can't listen on {host} ({error}); give --bind an address of this machine under "
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
