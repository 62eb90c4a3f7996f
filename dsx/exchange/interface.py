"""What the outer engine needs from whatever joins the clusters.

Two implementations: `InProcessExchange` (simulation, unit tests) and `TorchftExchange` (torchft
membership, gloo transport). Both carry opaque bytes, so that the engine above gives the same bits
over either.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch

from dsx.errors import ExchangeError


@dataclass(frozen=True)
class Membership:
    """Who takes part in a round: the same on every rank of every participating cluster."""

    clusters: tuple[str, ...]
    """Names in the order in which everybody sums."""
    index: int
    """This cluster's place in `clusters`."""
    number: int = 0
    """Of this meeting; a later one has a greater number."""

    @property
    def name(self) -> str:
        return self.clusters[self.index]

    def __len__(self) -> int:
        return len(self.clusters)


@dataclass
class Traffic:
    """Bytes this rank has moved over the slow link since the start of the process."""

    sent: int = 0
    received: int = 0


class Vote(IntEnum):
    """What a rank, and then a cluster, says about a round. The smallest vote counts."""

    REFUSED = 0
    """Somebody trains something else."""
    FAILED = 1
    """Something is missing here: the round can't be committed anywhere."""
    UNSURE = 2
    """Ready, but not everybody else has been heard: some may commit."""
    YES = 3


class Council(Protocol):
    """Collectives among the ranks of one cluster, for the exchange's thread alone."""

    def broadcast(self, decision: Any = None) -> Any:
        """Rank 0's `decision`."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order."""
        ...


class Exchange(Protocol):
    """The ranks of equal (stage, replica) of all clusters: one *outer group*.

    A round is `join` and any number of `all_to_all` and `agree`, always from the same thread. All
    methods block. A round that failed is ended by `reset`.

    Attributes:
        traffic: what this rank has moved.
        limit_seconds: the longest wait for one `all_to_all`.
        on_posted: called within `all_to_all`, when this rank's payloads are on their way.
    """

    limit_seconds: float
    on_posted: Callable[[], None]

    @property
    def traffic(self) -> Traffic: ...

    def join(self, seconds: float) -> Membership:
        """Agree with the other clusters on who takes part in the round that begins. Collective
        over this cluster.

        Raises:
            ExchangeError: on all ranks of this cluster, when that takes longer than `seconds`, or
                the coordinator can't be reached.
        """
        ...

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        """Send `payloads[i]` to member i; returns what each member sent here, in member order.

        Payloads are uint8, 1-D, on the CPU, of any length (zero included) up to `most` bytes;
        whoever announces more to this rank is refused before memory is taken for it.

        Raises:
            ExchangeError: a peer was lost, or took longer than `limit_seconds`. The round can then
                only be ended by `reset`.
        """
        ...

    def agree(self, vote: Vote, why: str = "") -> tuple[Vote, str]:
        """The smallest vote of this cluster's ranks, and why it was given. Collective over this
        cluster; no other cluster hears of it."""
        ...

    def reset(self) -> None:
        """The round failed: let go of the other members, who notice at once."""
        ...

    def close(self) -> None:
        """Leave for good and release sockets and threads."""
        ...


def gather(
    exchange: Exchange, members: int, payload: torch.Tensor, most: int
) -> list[torch.Tensor]:
    """Everybody's payload, in member order: one `all_to_all` of the same bytes to all."""
    return exchange.all_to_all([payload] * members, most)


def check_length(sender: str, length: int, most: int) -> None:
    """Raises ExchangeError when `sender` announces more than can be due here."""
    if not 0 <= length <= most:
        raise ExchangeError(
            f"cluster {sender} announces a message of {length} bytes where at most {most} can be "
            "due; it runs another version of dsx, or is none"
        )
