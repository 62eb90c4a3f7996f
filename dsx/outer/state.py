"""The state that all clusters hold alike, and how one that comes later gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict

from dsx.exchange.interface import Exchange, Membership
from dsx.outer.buckets import buckets, pack, unpack
from dsx.outer.digest import tensor_digest
from dsx.outer.leases import Leases
from dsx.outer.optimizer import OuterOptimizer

_MOST_SCALARS = 2**24
"""Bytes of the scalars, far more than there ever are."""


class Progress(BaseModel):
    """The scalars of the shared state."""

    model_config = ConfigDict(extra="forbid")

    round: int = 0
    """Rounds committed."""
    met: int = 0
    """Number of the meeting at which the last of them was committed."""
    began: int = 0
    """Number of the first meeting of the run's first clusters: states that differ in it are of
    different runs. 0 before that, and in checkpoints that do not tell."""
    tokens_total: int = 0
    """Tokens in committed pseudo-gradients, over all clusters."""
    delays: list[int] = []
    """State of the delay clock."""
    contributors: dict[str, int] = {}
    """Of the last committed round: tokens by cluster."""
    counted: dict[str, tuple[int, int]] = {}
    """By cluster, its last pseudo-gradient that counts: the round, and the inner step of the run at
    which it was taken."""
    steps: int = 0
    """Inner steps of the run in committed rounds (of the fastest cluster, where they differ)."""
    local_steps: int = 0
    """Inner steps (H) of the round after the newest committed one; 0 before the first start."""
    next_local_steps: int = 0
    """H of the round after that."""
    rank: int = 0
    """Of the low-rank codec, in the round after the newest committed one; 0: there is none."""
    next_rank: int = 0
    link_window: list[float] = []
    """Seconds of the exchange over those of an inner step, of the last rounds."""
    rank_window: list[float] = []
    """What the rank rule measured, of the last rounds."""
    exchange_seconds: float = 0.0
    """Of the slowest exchange of the last rounds; fades by a fifth a round."""
    paces: dict[str, float] = {}
    """Seconds of an inner step by cluster, smoothed."""
    leases: Leases = Leases()
    """Who trains which samples."""

    @property
    def version(self) -> tuple[int, int]:
        """Of the shared state, in its run: who has the greatest has the newest.

        Clusters that were cut off from each other may have committed the same round with different
        members. The one that met later was the one that the coordinator could still reach.
        """
        return self.round, self.met

    def round_samples(self, step_samples: int) -> int:
        """Samples of a cluster, of so many in an inner step, in the longest round known."""
        return step_samples * max(self.local_steps, self.next_local_steps)


@dataclass
class SharedState:
    """theta, outer momentum and progress of one rank's share of the model."""

    optimizer: OuterOptimizer
    progress: Progress = field(default_factory=Progress)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self.optimizer.theta.items()}

    @property
    def bytes(self) -> int:
        """Of theta and momentum together."""
        return sum(value.nbytes for value in self.tensors().values())

    def digests(self) -> tuple[list[int], list[int]]:
        """Contributions of this rank's theta and momentum to their digests."""
        return tensor_digest(self.optimizer.theta), tensor_digest(self.optimizer.momentum)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By `theta/NAME` and `momentum/NAME`; fp32, the state itself and not a copy."""
        named = {f"theta/{name}": value for name, value in self.optimizer.theta.items()}
        named |= {f"momentum/{name}": value for name, value in self.optimizer.momentum.items()}
        return named

    def load(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """Take over a copy of tensors as `tensors()` names them, and of `progress`."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self.progress = progress.model_copy(deep=True)


def hand_over(
    exchange: Exchange,
    membership: Membership,
    state: SharedState,
    source: int,
    receivers: Sequence[int],
) -> tuple[dict[str, torch.Tensor], Progress] | None:
    """Member `source` gives its shared state to the members `receivers`. Collective.

    Returns what `SharedState.load` takes, to a receiver.
    """
    own = membership.index
    sending, receiving = own == source, own in receivers

    def move(payload: torch.Tensor, most: int) -> torch.Tensor:
        nothing = torch.empty(0, dtype=torch.uint8)
        sent = [
            payload if sending and member in receivers else nothing
            for member in range(len(membership))
        ]
        return exchange.all_to_all(sent, most)[source]

    scalars = torch.frombuffer(
        bytearray(state.progress.model_dump_json().encode()), dtype=torch.uint8
    )
    got = move(scalars, _MOST_SCALARS)
    named = state.tensors()
    shapes = {name: value.shape for name, value in named.items()}
    fresh: dict[str, torch.Tensor] = {}
    for names in buckets(shapes):
        most = sum(4 * shapes[name].numel() for name in names)
        payload = move(pack(named, names) if sending else scalars[:0], most)
        if receiving:
            fresh |= unpack(payload, shapes, names, membership.clusters[source])
    # Only now is everything here: a source lost in between leaves the state untouched.
    return (fresh, Progress.model_validate_json(bytes(got.numpy()))) if receiving else None
