"""Seconds of an inner step, of an exchange, and of the two beside each other.

A step of M micro-batches over S stages takes M + S - 1 turns of the slowest stage: the bubble is
(S - 1) / (M + S - 1) of it (GPipe, 1F1B; arXiv 2104.04473). A ring all-reduce among D replicas
moves 2 (D - 1) / D of its bytes through each rank's wire.
"""

import math
from dataclasses import dataclass

from dsx.outer.overlap import DELAY_MARGIN


@dataclass(frozen=True)
class StepTime:
    """One inner step of one cluster, without other clusters."""

    compute: float
    """Of the slowest stage, all micro-batches."""
    bubble: float
    transfers: float
    """Hidden states and their gradients between stages, not overlapped by DeepSpeed's pipeline."""
    reduce: float
    """Gradients between replicas, and weights back after the step."""

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + self.transfers + self.reduce


@dataclass(frozen=True)
class Link:
    """A cluster's way to the others: bits per second and direction, seconds one way."""

    rate: float
    latency: float

    def seconds(self, bytes_: float, roundtrips: int) -> float:
        """For as many bytes out as in."""
        return 8 * WIRE * bytes_ / self.rate + 2 * self.latency * roundtrips


WIRE = 1538 / 1460
"""Ethernet, IP and TCP headers, preamble and gap: 1,460 bytes of payload take the time of 1,538."""


def pipeline(turn: float, micro_batches: int, stages: int) -> tuple[float, float]:
    """(busy seconds, bubble seconds) of a step whose slowest stage takes `turn` a micro-batch."""
    return turn * micro_batches, turn * (stages - 1)


def ring(bytes_: float, ranks: int, rate: float) -> float:
    """Seconds of an all-reduce of `bytes_` among `ranks` at `rate` bits per second and rank."""
    return 8 * bytes_ * 2 * (ranks - 1) / ranks / rate


@dataclass(frozen=True)
class RoundTime:
    """One round: H inner steps beside the exchange of the round before."""

    seconds: float
    stalled: float
    """For which inner steps stand still."""
    delay: int
    """Inner steps after which the average is applied."""


def round_time(
    step: float, local_steps: int, delay: int | str, exchange: float, boundary: float
) -> RoundTime:
    """How a round passes.

    Args:
        step: seconds of an inner step.
        delay: as in the settings; `auto` follows the engine's own rule.
        exchange: seconds from the boundary to the committed average.
        boundary: seconds for which both ends of a round stop the inner steps in any case.
    """
    if delay == "round":
        steps = local_steps
    elif delay == "auto":
        steps = max(1, min(local_steps, math.ceil(DELAY_MARGIN * exchange / step)))
    else:
        steps = int(delay)
    stalled = max(0.0, exchange - steps * step) + boundary
    return RoundTime(local_steps * step + stalled, stalled, steps)
