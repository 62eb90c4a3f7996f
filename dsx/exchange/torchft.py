"""Clusters as separate launches: torchft decides who takes part, gloo carries the bytes.

The parts of `torchft.coordination` are used directly, not `torchft.Manager`: the manager binds to
all interfaces, moves state as pickles over HTTP, and knows only all-reduce, while a round here
moves opaque messages of unequal length and heals a joiner inside the round itself.
"""

import hashlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Store, TCPStore
from torch.distributed import ProcessGroupGloo as Gloo

# torchft reads this once, when it is imported; at its own default it tells seven lines a round.
os.environ.setdefault("RUST_LOG", "warn")

from torchft import ProcessGroupGloo
from torchft.coordination import ManagerClient, ManagerServer

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Membership, Traffic, check_length

_MANAGER_KEY = "dsx/manager"
# The control traffic shares the slow link with the exchange: at torchft's default of ten beats a
# second it would take several per cent of a 0.5 Mbit/s link. The lighthouse waits for 5 s.
_HEARTBEAT = timedelta(seconds=1)


@dataclass(frozen=True)
class ClusterAddress:
    """Where a rank stands in its cluster, and the store that its ranks share."""

    cluster: str
    rank: int
    world_size: int
    store_host: str
    store_port: int


class _BoundGloo(ProcessGroupGloo):
    """torchft's reconfigurable gloo group, listening on one address only."""

    def __init__(self, bind_host: str, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._bind_host = bind_host

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        # gloo's own choice would follow this machine's host name or GLOO_SOCKET_IFNAME.
        options = Gloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [Gloo.create_device(hostname=self._bind_host)]
        backend = Gloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        return group


class TorchftExchange:
    """This rank's end of its outer group.

    Membership is one torchft quorum per round. Rank 0 of a cluster runs the cluster's manager,
    through which all its ranks agree on the quorum and on the commit.

    Args:
        address: this rank's place in its cluster.
        coordinator: URL of `dsx coordinator`, for example `http://127.0.0.1:29510`.
        bind_host: the address on which this cluster's manager listens and is reached.
        timeout_seconds: longest wait for a quorum or for one payload.
        connect_seconds: longest wait for the coordinator and the cluster's manager.

    Raises:
        ExchangeError: the coordinator can't be reached.
    """

    def __init__(
        self,
        address: ClusterAddress,
        coordinator: str,
        bind_host: str = "127.0.0.1",
        timeout_seconds: float = 600.0,
        connect_seconds: float = 60.0,
    ) -> None:
        connect = timedelta(seconds=connect_seconds)
        self.traffic = Traffic()
        self._address = address
        self._timeout = timedelta(seconds=timeout_seconds)
        self._connected: tuple[int, tuple[str, ...]] | None = None
        self._attempt = 0
        self._failures = 0
        self._membership = Membership((address.cluster,), 0)
        self._group = _BoundGloo(bind_host, self._timeout)
        self._manager: ManagerServer | None = None
        store = TCPStore(
            host_name=address.store_host,
            port=address.store_port,
            is_master=False,
            wait_for_workers=False,
        )
        if address.rank == 0:
            self._manager = _reaching(
                coordinator,
                lambda: ManagerServer(
                    # torchft tells a restarted cluster from its former self by the suffix.
                    replica_id=f"{address.cluster}:{uuid.uuid4()}",
                    lighthouse_addr=coordinator,
                    hostname=bind_host,
                    bind=f"{bind_host}:0",
                    store_addr=f"{address.store_host}:{address.store_port}",
                    world_size=address.world_size,
                    heartbeat_interval=_HEARTBEAT,
                    connect_timeout=connect,
                    quorum_retries=0,
                ),
            )
            store.set(_MANAGER_KEY, self._manager.address())
        manager_address = store.get(_MANAGER_KEY).decode()
        self._client = ManagerClient(manager_address, connect_timeout=connect)

    def join(self) -> Membership:
        self._attempt += 1
        try:
            quorum = self._client._quorum(
                group_rank=self._address.rank,
                # State is moved by the outer engine, so torchft must never ask for healing: to it
                # all clusters are always at the same step.
                step=0,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=self._timeout,
                init_sync=False,
                # After a failed round torchft makes a new quorum, and with it new connections.
                commit_failures=self._failures,
            )
        except Exception as error:
            raise ExchangeError(f"no quorum of clusters was reached: {error}") from error
        clusters = tuple(replica.split(":")[0] for replica in quorum.replica_ids)
        if len(set(clusters)) != len(clusters):
            raise ExchangeRefused(
                f"two clusters have the same name (present: {', '.join(clusters)}); "
                "start each with its own --cluster"
            )
        self._membership = Membership(clusters, quorum.replica_rank)
        # A coordinator that was restarted counts its quorums from the start again.
        quorum_key = (quorum.quorum_id, tuple(quorum.replica_ids))
        if quorum_key != self._connected:
            self._connect(quorum.store_address, quorum_key)
        return self._membership

    def _connect(self, store_address: str, quorum: tuple[int, tuple[str, ...]]) -> None:
        self._connected = None
        quorum_id, replicas = quorum
        meeting = hashlib.blake2b(repr(quorum).encode(), digest_size=8).hexdigest()
        try:
            self._group.configure(
                f"{store_address}/dsx/{meeting}/{self._address.rank}",
                self._address.cluster,
                self._membership.index,
                len(replicas),
                quorum_id,
            )
        except Exception as error:
            raise ExchangeError(
                f"no connection to {', '.join(self._membership.clusters)}: {error}"
            ) from error
        self._connected = quorum

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        mine = self._membership.index
        lengths = self._swap(
            [torch.tensor([payload.numel()], dtype=torch.int64) for payload in payloads],
            [torch.zeros(1, dtype=torch.int64) for _ in payloads],
        )
        try:
            for name, length in zip(self._membership.clusters, lengths, strict=True):
                check_length(name, int(length), most)
        except ExchangeError:
            self._connected = None  # The bytes that it announced may be on their way.
            raise
        received = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        received[mine] = payloads[mine]
        return self._swap(payloads, received)

    def _swap(self, sent: list[torch.Tensor], received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move one tensor to and from every other member, all at once; own place untouched."""
        mine = self._membership.index
        try:
            pending = []
            for other in range(len(self._membership)):
                if other == mine:
                    continue
                if received[other].numel():
                    pending.append(self._group.recv([received[other]], other, 0))
                if sent[other].numel():
                    pending.append(self._group.send([sent[other].contiguous()], other, 0))
                self.traffic.sent += sent[other].nbytes
                self.traffic.received += received[other].nbytes
            for work in pending:
                work.wait()
        except Exception as error:
            # A half-done transfer leaves the connection unusable: the next round makes a new one.
            self._connected = None
            raise ExchangeError(f"a transfer between clusters failed: {error}") from error
        return received

    def commit(self, succeeded: bool) -> bool:
        try:
            committed = self._client.should_commit(
                group_rank=self._address.rank,
                step=self._attempt,
                should_commit=succeeded,
                timeout=self._timeout,
            )
        except Exception as error:
            raise ExchangeError(
                f"the ranks of cluster {self._address.cluster} could not agree on the commit: "
                f"{error}"
            ) from error
        self._failures = 0 if committed else self._failures + 1
        return committed

    def close(self) -> None:
        self._group.abort(errored=False)
        if self._manager is not None:
            self._manager.shutdown()


def _reaching(coordinator: str, start: Callable[[], ManagerServer]) -> ManagerServer:
    try:
        return start()
    except Exception as error:
        raise ExchangeError(
            f"the coordinator at {coordinator} can't be reached: {error}; start one with "
            "`dsx coordinator --bind HOST:PORT` and give its address to --coordinator"
        ) from error
