"""What one cluster has for itself, beside the state that all clusters share."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from dsx.outer.leases import Ranges
from dsx.outer.overlap import DelayClock
from dsx.outer.round import Contribution, Outcome
from dsx.outer.snapshot import FlightRecord, OutcomeRecord
from dsx.outer.steps import StepCounter


@dataclass
class Flight:
    """A pseudo-gradient on the wire."""

    future: "Future[Outcome]"
    start: dict[str, torch.Tensor]
    """s: the local weights from which training went on at the boundary."""
    end: dict[str, torch.Tensor]
    """The local weights that the round ended with; `start` itself when all was kept."""
    record: FlightRecord
    """What is known of it beside tensors; without an outcome, which the future has."""

    def contribution(self, delta: Mapping[str, torch.Tensor] | None) -> Contribution:
        """What goes into the exchange; `delta` is None when it is not sound."""
        record = self.record
        return Contribution(
            delta,
            record.tokens,
            record.step_seconds,
            record.exchange_seconds,
            record.measured_rank,
            record.step,
            record.trained,
        )

    def saved(self, outcome: OutcomeRecord | None) -> FlightRecord:
        """For a snapshot; JSON knows no norm that is not finite."""
        norm = self.record.norm if self.record.sound else 0.0
        return self.record.model_copy(update={"norm": norm, "outcome": outcome})

    def tensors(self, unsent: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """For a snapshot; `unsent` is what of an exchange that is over is not in theta."""
        named = {f"flight_start/{name}": value for name, value in self.start.items()}
        named |= {f"flight_unsent/{name}": value for name, value in (unsent or {}).items()}
        if self.end is not self.start:
            named |= {f"flight_end/{name}": value for name, value in self.end.items()}
        return named


@dataclass
class OwnState:
    """The scalars of one cluster's outer engine, the same on all its ranks, and what it has in the
    air."""

    delays: DelayClock
    steps: StepCounter = field(default_factory=StepCounter)
    tokens: int = 0
    """Trained since the last boundary, or before it in vain so far."""
    trained: Ranges = field(default_factory=list)
    """The samples of these, on lease to the cluster."""
    todo: Ranges = field(default_factory=list)
    """What it has on lease to be trained, in this order."""
    seconds: float = 0.0
    """That these took."""
    share: float = 1.0
    """Last known weight w_c in the average."""
    measured_rank: float = 0.0
    """What the rank rule saw in the last round; the next header carries it."""
    last_exchange_seconds: float = 0.0
    rounds_left_out: int = 0
    """For which there was nothing finite to send."""
    flight: Flight | None = None

    def forget(self) -> None:
        """Nothing of what was made since the last committed round counts."""
        self.flight = None
        self.tokens = 0
        self.trained = []
        self.seconds = self.measured_rank = 0.0
