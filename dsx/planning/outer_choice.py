"""Which rounds and which codec hide behind the inner steps at the least loss."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dsx.outer.overlap import DELAY_MARGIN
from dsx.planning.exchange import Traffic
from dsx.planning.quality import EARLY, Measured, expected_kept, nearest
from dsx.planning.time import Link, RoundTime, round_time
from dsx.settings.adapt_block import LinkSteps
from dsx.settings.codec_block import CompressionSettings, LowRankCodec, SignCodec, TopKCodec
from dsx.settings.dsx_block import OuterSettings

_FRACTIONS = (0.1, 0.075, 0.05, 0.03, 0.01)
_SHORT_ROUND, _SHORTEST_ROUND, _LONGEST_ROUND = 10, 4, 500
"""Of an early average, of one that comes a round late (docs/quality.md), and of either."""
_LATE_MOMENTUM = {"momentum": 0.5, "momentum_warmup_steps": 0}
"""Of one that comes a round late, as measured there."""

CODEC_BYTES_PER_SECOND = {"topk": 0.22e9, "lowrank": 0.3e9}
"""fp32 bytes that a rank's one thread encodes a second (docs/measurements.md); others: 1e9."""
HOST_BYTES_PER_SECOND = 8e9
"""Of a rank's fp32 tensors read or written by its host."""
_BOUNDARY_PASSES = 10
"""Over a rank's share at both ends of a round: fetch, subtract, norm; rebase, store."""


@dataclass(frozen=True)
class OuterPlan:
    """Outer settings on a link."""

    settings: OuterSettings
    traffic: Traffic
    exchange_seconds: float
    """From the boundary to the committed average: encoding, link, decoding."""
    link_seconds: float
    boundary_seconds: float
    time: RoundTime
    measured: Measured

    @property
    def hides(self) -> bool:
        """Inner steps wait for nothing but the two ends of the round."""
        return self.time.stalled <= self.boundary_seconds

    @property
    def expected_kept(self) -> float:
        """Of the gap to all-reduce, by the nearest measurement."""
        return expected_kept(self.measured, self.settings, self.time.delay)


def outer_plan(
    outer: OuterSettings, traffic: Traffic, owned: int, clusters: int, link: Link, step: float
) -> OuterPlan:
    """The settings' rounds, of as many inner steps as their rule chooses on that link.

    Args:
        owned: parameters of the rank that owns most.
        step: seconds of an inner step.
    """
    on_link = link.seconds(traffic.bytes, traffic.roundtrips)
    exchange = on_link + codec_seconds(outer, owned, clusters)
    rule = outer.steps_rule
    if isinstance(rule, LinkSteps):
        steps = rule.clamp(math.ceil(exchange / step / rule.share))
        outer = outer.model_copy(update={"local_steps": steps})
    boundary = _BOUNDARY_PASSES * 4 * owned / HOST_BYTES_PER_SECOND
    time = round_time(step, outer.local_steps, outer.delay, exchange, boundary)
    return OuterPlan(
        outer,
        traffic,
        exchange,
        on_link,
        boundary,
        time,
        nearest(outer, time.delay),
    )


def codec_seconds(outer: OuterSettings, parameters: int, clusters: int) -> float:
    """To encode one update and to decode those of two clusters, or two means, on one thread."""
    rate = CODEC_BYTES_PER_SECOND.get(outer.compression.matrices.type, 1e9)
    return 4 * parameters * (1 + min(clusters, 2)) / rate


def shortest_round(exchange: float, step: float, least: int, share: float) -> int:
    """The fewest inner steps, `least` or more, of which `share` covers the exchange."""
    delay = max(1, math.ceil(DELAY_MARGIN * exchange / step))
    return max(least, math.ceil(delay / share))


def compressions(settings: CompressionSettings) -> Iterator[CompressionSettings]:
    """The settings' own, then sparser and sparser signs."""
    yield settings
    for fraction in _FRACTIONS:
        codec = TopKCodec(fraction=fraction, values=SignCodec())
        yield settings.model_copy(update={"matrices": codec, "embeddings": codec})


def candidates(
    outer: OuterSettings, compression: CompressionSettings, exchange: float, step: float
) -> Iterator[OuterSettings]:
    """Rounds that cover `exchange` by a fifth of themselves, and by all of themselves."""
    sparse = not isinstance(compression.matrices, LowRankCodec)
    changes = {"compression": compression, "own_share": "all"}
    changes |= {"own_residual": "all"} if sparse else {}
    early = shortest_round(exchange, step, _SHORT_ROUND, EARLY)
    if early <= _LONGEST_ROUND:
        yield outer.model_copy(update={**changes, "local_steps": early, "delay": "auto"})
    whole = shortest_round(exchange, step, _SHORTEST_ROUND, 1.0)
    if whole <= _LONGEST_ROUND:
        yield outer.model_copy(
            update={**changes, "local_steps": whole, "delay": "round", **_LATE_MOMENTUM}
        )
