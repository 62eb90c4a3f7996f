"""Clusters as separate launches: torchft decides who takes part, gloo carries the bytes.

torchft's coordinator and process group are used directly, not `torchft.Manager`: the manager binds
to all interfaces, moves state as pickles over HTTP, and knows only all-reduce, while a round here
moves opaque messages of unequal length and heals a joiner inside the round itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Store, TCPStore
from torch.distributed import ProcessGroupGloo as Gloo

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Council, Membership, Traffic, Vote, check_length
from dsx.exchange.quorum import Meeting, Pulse, QuorumClient

# After `quorum`, which sets how much torchft tells.
from torchft import ProcessGroupGloo  # isort: skip


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

    Rank 0 of a cluster asks the coordinator who takes part in a round, and tells the other ranks.

    Args:
        address: this rank's place in its cluster.
        coordinator: URL of `dsx coordinator`, for example `http://127.0.0.1:29510`.
        council: collectives among this cluster's ranks, which nobody else uses.
        bind_host: the address on which this rank is reached by its peers.
        timeout_seconds: longest wait for one payload, until `limit_seconds` is set.
        connect_seconds: longest wait for the coordinator.

    Raises:
        ExchangeError: the coordinator can't be reached.
    """

    def __init__(
        self,
        address: ClusterAddress,
        coordinator: str,
        council: Council,
        bind_host: str = "127.0.0.1",
        timeout_seconds: float = 600.0,
        connect_seconds: float = 60.0,
    ) -> None:
        self.traffic = Traffic()
        self.limit_seconds = timeout_seconds
        self.on_posted: Callable[[], None] = lambda: None
        self._address = address
        self._council = council
        self._connection = ""
        self._membership = Membership((address.cluster,), 0)
        self._group = _BoundGloo(bind_host, timedelta(seconds=timeout_seconds))
        self._client: QuorumClient | None = None
        problem = None
        if address.rank == 0:
            store = f"{address.store_host}:{address.store_port}"
            try:
                self._client = QuorumClient(address.cluster, store, coordinator, connect_seconds)
            except ExchangeError as error:
                problem = str(error)
        problem = council.broadcast(problem)
        if problem is not None:
            raise ExchangeError(problem)
        self._pulse = Pulse(
            self._open_store,
            address.rank,
            address.world_size,
            self._client.beat if self._client is not None else None,
        )

    def _open_store(self) -> TCPStore:
        return TCPStore(
            host_name=self._address.store_host,
            port=self._address.store_port,
            is_master=False,
            wait_for_workers=False,
        )

    def join(self, seconds: float) -> Membership:
        meeting: Meeting | None = None
        problem = ""
        if self._client is not None:
            try:
                meeting = self._client.ask(self._connection, seconds)
            except ExchangeError as error:
                problem = str(error)
        told: tuple[Meeting | None, int, str] = (meeting, 0, problem)
        if meeting is not None and self._client is not None:
            told = (meeting, meeting.replicas.index(self._client.replica), "")
        meeting, place, problem = self._council.broadcast(told)
        if meeting is None:
            raise ExchangeError(problem)
        clusters = tuple(replica.split(":")[0] for replica in meeting.replicas)
        if len(set(clusters)) != len(clusters):
            raise ExchangeRefused(
                f"two clusters have the same name (present: {', '.join(clusters)}); "
                "start each with its own --cluster"
            )
        self._membership = Membership(clusters, place, meeting.number)
        problem = self._connect(meeting) if meeting.connection != self._connection else ""
        problems = [problem for problem in self._council.gather(problem) if problem]
        if problems:
            self.reset()
            raise ExchangeError(problems[0])
        self._connection = meeting.connection
        return self._membership

    def _connect(self, meeting: Meeting) -> str:
        """Make new connections to all members; returns what went wrong."""
        rank, members = self._address.rank, len(meeting.replicas)
        self._group.abort(errored=False)
        if members == 1:
            return ""
        self._group.set_timeout(timedelta(seconds=self.limit_seconds))
        try:
            self._group.configure(
                f"{meeting.stores[rank % members]}/dsx/{meeting.connection}/{rank}",
                self._address.cluster,
                self._membership.index,
                members,
            )
        except Exception as error:
            return f"no connection to {', '.join(self._membership.clusters)}: {error}"
        return ""

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        mine = self._membership.index
        lengths = self._swap(
            [torch.tensor([payload.numel()], dtype=torch.int64) for payload in payloads],
            [torch.zeros(1, dtype=torch.int64) for _ in payloads],
        )
        for name, length in zip(self._membership.clusters, lengths, strict=True):
            check_length(name, int(length), most)
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
            self.on_posted()
            for work in pending:
                work.wait(timedelta(seconds=self.limit_seconds))
        except Exception as error:
            raise ExchangeError(f"a transfer between clusters failed: {error}") from error
        return received

    def agree(self, vote: Vote, why: str = "") -> tuple[Vote, str]:
        smallest, reason = min(self._council.gather((int(vote), why)))
        return Vote(smallest), reason

    def reset(self) -> None:
        self._connection = ""
        self._group.abort(errored=False)

    def close(self) -> None:
        self._pulse.close()
        self._group.abort(errored=False)
