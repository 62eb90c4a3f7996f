"""How a rank gets its end of the exchange between clusters."""

import socket
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from dsx.cluster.agreement import ClusterAgreement
from dsx.errors import ExchangeError
from dsx.exchange.torchft import ClusterAddress, TorchftExchange


def meet(
    cluster: str,
    coordinator: str,
    bind_host: str | None,
    rank: int,
    world_size: int,
    agreement: ClusterAgreement,
    timeout_seconds: float,
) -> tuple[TorchftExchange, TCPStore | None]:
    """Join the clusters that `coordinator` knows. Collective over the ranks of this cluster.

    Args:
        bind_host: the address under which the other clusters reach this one; None takes the one
            from which the coordinator is reached.

    Returns:
        the exchange, and on rank 0 the store that has to live as long as it.

    Raises:
        ExchangeError: the coordinator's address can't be used.
    """
    host = bind_host or _own_address(coordinator)
    store: TCPStore | None = None
    address = None
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = [host, store.port]
    store_host, store_port = agreement.broadcast(address)
    place = ClusterAddress(cluster, rank, world_size, store_host, store_port)
    return TorchftExchange(place, coordinator, host, timeout_seconds), store


def _own_address(coordinator: str) -> str:
    parts = urlsplit(coordinator)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ExchangeError(
            f"--coordinator is {coordinator!r}; give an address like http://127.0.0.1:29510"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks the system for the route.
            probe.connect((parts.hostname, parts.port))
        except OSError as error:
            raise ExchangeError(f"no route to the coordinator at {coordinator}: {error}") from error
        return str(probe.getsockname()[0])
