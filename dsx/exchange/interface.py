"""What the outer engine needs from whatever joins the clusters.

Two implementations: `InProcessExchange` (simulation, unit tests) and `TorchftExchange` (torchft
membership, gloo transport). Both carry opaque bytes, so that the engine above gives the same bits
over either.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from dsx.errors import ExchangeError


@dataclass(frozen=True)
class Membership:
    """Who takes part in a round: the same on every rank of every participating cluster."""

    clusters: tuple[str, ...]
    """Names in the order in which everybody sums."""
    index: int
    """This cluster's place in `clusters`."""

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


class Exchange(Protocol):
    """The ranks of equal (stage, replica) of all clusters: one *outer group*.

    A round is `join`, any number of `all_to_all`, `commit`, always from the same thread. All
    methods block. Every method raises `dsx.errors.ExchangeError` when a peer is lost or refused;
    the round can then only be ended by `commit(False)`.
    """

    @property
    def traffic(self) -> Traffic: ...

    def join(self) -> Membership:
        """Agree with the other clusters on who takes part in the round that begins."""
        ...

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        """Send `payloads[i]` to member i; returns what each member sent here, in member order.

        Payloads are uint8, 1-D, on the CPU, of any length (zero included) up to `most` bytes;
        whoever announces more to this rank is refused before memory is taken for it.
        """
        ...

    def commit(self, succeeded: bool) -> bool:
        """End the round. True when every rank of this cluster reported success."""
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
