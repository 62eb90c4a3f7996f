"""The few numbers that a run comes down to."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.tracking.events import (
    EvalEvent,
    Event,
    InnerEvent,
    OuterEvent,
    RunEvent,
    latest_by_step,
    of_kind,
    read_events,
)

FP32_BYTES = 4


@dataclass(frozen=True)
class ClusterSummary:
    """One cluster's part. Seconds and bytes count repeated work after a resume, too."""

    name: str
    first_loss: float | None
    """Training loss of the first inner step, nats per token; None before any step."""
    last_loss: float | None
    steps: int
    tokens: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    all_reduce_bytes: int | None
    """What a per-step fp32 all-reduce of the gradients sends: 4 x parameters x steps."""
    compute_seconds: float
    blocked_seconds: float
    exchange_seconds: float


@dataclass(frozen=True)
class RunSummary:
    """A whole run, over its clusters."""

    name: str
    clusters: tuple[ClusterSummary, ...]
    parameters: int | None
    shared_eval_loss: float | None
    """The last held-out loss of the shared weights, nats per token."""
    bits_per_byte: float | None
    """That loss in bits per byte of held-out text."""
    tokens: int
    """Over all clusters."""
    seconds: float
    """Wall-clock seconds that the longest cluster ran, without the gaps between resumes."""

    @classmethod
    def from_run(cls, run_dir: Path | str) -> "RunSummary":
        """Read it from a run's folder. Raises `TrackingError` when there are no metrics."""
        return cls.from_events(read_events(run_dir), Path(run_dir).resolve().name)

    @classmethod
    def from_events(cls, events: Sequence[Event], name: str) -> "RunSummary":
        """`name` stands in where no `run` line gives the run's own."""
        by_cluster = split_by_cluster(events)
        starts = of_kind(events, RunEvent)
        parameters = starts[-1].model_size if starts else None
        evaluations = [e for e in of_kind(events, EvalEvent) if e.weights == "shared"]
        last_eval = max(evaluations, key=lambda e: (e.step, e.time), default=None)
        loss = last_eval.loss if last_eval else None
        bytes_per_token = starts[-1].heldout_bytes_per_token if starts else None
        clusters = tuple(
            _summarise(cluster, own, parameters) for cluster, own in by_cluster.items()
        )
        return cls(
            name=run_name(events) or name,
            clusters=clusters,
            parameters=parameters,
            shared_eval_loss=loss,
            bits_per_byte=bits_per_byte(loss, bytes_per_token),
            tokens=sum(cluster.tokens for cluster in clusters),
            seconds=max((_seconds(own) for own in by_cluster.values()), default=0.0),
        )

    @property
    def bytes_exchanged(self) -> int:
        """Bytes sent between clusters, each counted once."""
        return sum(cluster.bytes_sent for cluster in self.clusters)

    @property
    def all_reduce_bytes(self) -> int | None:
        """What per-step fp32 all-reduce between the clusters would have sent."""
        if self.parameters is None or len(self.clusters) < 2:
            return None
        return sum(cluster.all_reduce_bytes or 0 for cluster in self.clusters)

    @property
    def times_fewer_bytes(self) -> float | None:
        """`all_reduce_bytes` over `bytes_exchanged`."""
        if self.all_reduce_bytes is None or self.bytes_exchanged == 0:
            return None
        return self.all_reduce_bytes / self.bytes_exchanged


def split_by_cluster(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Each cluster's events in their order; clusters by name."""
    names = sorted({event.cluster for event in events})
    return {name: [event for event in events if event.cluster == name] for name in names}


def bits_per_byte(loss: float | None, bytes_per_token: float | None) -> float | None:
    """A loss in nats per token as bits per byte of the text."""
    if loss is None or bytes_per_token is None:
        return None
    return loss / math.log(2) / bytes_per_token


def run_name(events: Sequence[Event]) -> str | None:
    """`dsx.name` of the settings that the run was last started with."""
    starts = of_kind(events, RunEvent)
    name = starts[-1].settings.get("dsx", {}).get("name") if starts else None
    return str(name) if name else None


def compute_seconds(steps: Sequence[InnerEvent]) -> list[float]:
    """Seconds of each inner step, from its tokens and its tokens per second.

    `steps`: one cluster's, in order of step. A step without a rate counts 0 s.
    """
    seconds = []
    previous: InnerEvent | None = None
    for step in steps:
        # The first line may not be step 1 (a cluster that joined late): spread its tokens.
        tokens = step.tokens - previous.tokens if previous else step.tokens / max(step.step, 1)
        rate = step.tokens_per_second
        seconds.append(tokens / rate if rate > 0 else 0.0)
        previous = step
    return seconds


def _summarise(name: str, events: Sequence[Event], parameters: int | None) -> ClusterSummary:
    steps = latest_by_step(events)
    rounds = of_kind(events, OuterEvent)
    return ClusterSummary(
        name=name,
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        steps=len(steps),
        tokens=steps[-1].tokens if steps else 0,
        rounds=len({event.round for event in rounds}),
        bytes_sent=sum(event.bytes_sent for event in rounds),
        bytes_received=sum(event.bytes_received for event in rounds),
        all_reduce_bytes=FP32_BYTES * parameters * len(steps) if parameters is not None else None,
        compute_seconds=sum(compute_seconds(steps)),
        blocked_seconds=sum(event.blocked_seconds for event in rounds),
        exchange_seconds=sum(event.exchange_seconds for event in rounds),
    )


def _seconds(events: Sequence[Event]) -> float:
    """Time between the lines of one cluster, start by start."""
    total = 0.0
    for before, after in itertools.pairwise(events):
        if not isinstance(after, RunEvent):
            total += after.time - before.time
    return total
