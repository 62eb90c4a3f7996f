"""The outer engine's state at one moment, as it is written and read back.

All tensors are whole and named by parameter, so that they follow the parameter to whichever rank
owns it later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict

from dsx.outer.averaging import Moments
from dsx.outer.leases import Ranges
from dsx.outer.round import Outcome
from dsx.outer.state import Progress
from dsx.outer.steps import StepCounter

WantsShared = Callable[[int, str], bool]
"""(round, digest of theta and outer momentum) -> whether these have to be copied."""


class OutcomeRecord(BaseModel):
    """An exchange that is over, whose average was not applied here yet."""

    model_config = ConfigDict(extra="forbid")

    committed: bool
    cluster: str
    clusters: list[str]
    contributors: list[str]
    share: float
    exchange_seconds: float
    slowest_exchange: float
    fastest_step: float
    moments: list[float]
    """Summed over the ranks of the cluster."""
    measured: list[float]
    """Likewise."""
    healed: bool = False
    unsent_tokens: int = 0
    unsent_samples: Ranges = []
    claim: Ranges | None = None
    diverged: bool = False

    @staticmethod
    def of(outcome: Outcome, moments: list[float], measured: list[float]) -> "OutcomeRecord":
        return OutcomeRecord(
            committed=outcome.committed,
            cluster=outcome.cluster,
            clusters=list(outcome.clusters),
            contributors=list(outcome.contributors),
            share=outcome.share,
            exchange_seconds=outcome.exchange_seconds,
            slowest_exchange=outcome.slowest_exchange,
            fastest_step=outcome.fastest_step,
            moments=moments,
            measured=measured,
            healed=outcome.healed,
            unsent_tokens=outcome.unsent_tokens,
            unsent_samples=outcome.unsent_samples,
            claim=outcome.claim,
            diverged=outcome.diverged,
        )

    @staticmethod
    def unseen(tokens: dict[str, int], cluster: str) -> "OutcomeRecord":
        """Of a round whose end `cluster` did not see: all that its `tokens` by cluster tell."""
        return OutcomeRecord(
            committed=True,
            cluster=cluster,
            clusters=list(tokens),
            contributors=list(tokens),
            share=tokens[cluster] / sum(tokens.values()),
            exchange_seconds=0.0,
            slowest_exchange=0.0,
            fastest_step=0.0,
            moments=[],
            measured=[],
        )

    def outcome(
        self,
        theta_digest: list[int],
        with_moments: bool,
        measures: int,
        unsent: Mapping[str, torch.Tensor],
    ) -> Outcome:
        """As the exchange gave it. What are sums over ranks goes to one rank only.

        Args:
            unsent: what of the pseudo-gradient is not in theta; empty when all is.
            measures: length of what the rank rule measures.
        """
        return Outcome(
            committed=self.committed,
            cluster=self.cluster,
            clusters=tuple(self.clusters),
            contributors=tuple(self.contributors),
            share=self.share,
            exchange_seconds=self.exchange_seconds,
            slowest_exchange=self.slowest_exchange,
            fastest_step=self.fastest_step,
            theta_digest=theta_digest,
            moments=Moments(*self.moments) if with_moments else Moments(),
            # A rule that was another one when this was saved measured something else.
            measured=self.measured
            if with_moments and len(self.measured) == measures
            else [0.0] * measures,
            healed=self.healed,
            unsent=unsent or None,
            unsent_tokens=self.unsent_tokens,
            unsent_samples=self.unsent_samples,
            claim=self.claim,
            diverged=self.diverged,
        )


class FlightRecord(BaseModel):
    """A pseudo-gradient on the wire; its tensors are `flight_start/NAME`, `flight_end/NAME`."""

    model_config = ConfigDict(extra="forbid")

    base_round: int
    """Rounds committed when it was launched."""
    local_steps: int
    delay: int
    norm: float
    tokens: int
    trained: Ranges
    """Samples in it."""
    step_seconds: float
    exchange_seconds: float
    measured_rank: float
    """What the rank rule saw in the round before."""
    step: int
    """Inner step of the run at the boundary."""
    rank: int
    """That it is encoded with; 0: no low rank."""
    sound: bool
    """False: it was not finite, and so nothing is sent."""
    outcome: OutcomeRecord | None = None
    """None: the same exchange is made again."""


class EngineRecord(BaseModel):
    """The scalars of one cluster's outer engine."""

    model_config = ConfigDict(extra="forbid")

    steps: StepCounter
    tokens: int
    trained: Ranges
    todo: Ranges
    seconds: float
    share: float
    measured_rank: float
    """What the rank rule saw in the last round; the next header carries it."""
    last_exchange_seconds: float
    rounds_left_out: int
    delays: list[int]
    """State of the delay clock."""
    bytes_sent: int
    """Over all ranks, since the last report."""
    bytes_received: int
    flight: FlightRecord | None


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of the state.

    Attributes:
        progress: scalars that all clusters hold alike.
        digest: of theta and outer momentum of the whole model; independent of the layout.
        shared: `theta/NAME`, `momentum/NAME`; None when they were not wanted.
        record: this cluster's own scalars, the same on all its ranks.
        own: this cluster's own tensors, by `PART/NAME`: `flight_start`, `flight_end`, and what the
            averager remembers.
    """

    progress: Progress
    digest: str
    shared: Mapping[str, torch.Tensor] | None
    record: EngineRecord | None
    own: Mapping[str, torch.Tensor]


def part(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors `name/...`, by the rest of their key."""
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }
