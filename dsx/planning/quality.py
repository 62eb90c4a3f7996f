"""What a choice costs in loss: the measurements of docs/quality.md as data."""

import math
from dataclasses import dataclass

from dsx.settings.codec_block import CodecSettings, TopKCodec
from dsx.settings.dsx_block import OuterSettings

BASIS = (
    "docs/quality.md: 2 clusters, one to three seeds; the shipped choices with 1.1 M parameters, "
    "others with 0.17 M; for other settings and sizes an extrapolation"
)
EARLY = 0.2
"""Share of a round within which a late average costs nothing that shows."""
LOST_PER_DOUBLING = 0.17
"""Of `kept` when a round is twice as long: measured from rounds of 10 to rounds of 20 steps."""


@dataclass(frozen=True)
class Measured:
    """One row: what part of the gap between one cluster and all-reduce was kept."""

    kept: float
    local_steps: int
    delay: int
    """Inner steps."""
    codec: str
    steps: int
    """Inner steps of the whole run; short runs are harder."""
    own_share: str = "all"
    own_residual: str = "all"

    @property
    def text(self) -> str:
        residual = ", residual kept" if self.own_residual == "all" else ""
        return (
            f"H {self.local_steps}, delay {self.delay}, {self.codec}{residual}, "
            f"{self.steps:,} steps"
        )


ROWS = (
    Measured(0.81, 10, 2, "topk 0.1 sign", 2000),
    Measured(0.75, 20, 4, "topk 0.075 sign", 2000),
    Measured(0.74, 4, 4, "topk 0.1 sign", 2000),
    Measured(0.81, 12, 2, "topk 0.033 sign", 4000),
    Measured(0.65, 16, 3, "topk 0.052 sign", 4000),
    Measured(0.68, 24, 4, "topk 0.1 sign", 4000),
    Measured(0.95, 10, 2, "topk 0.1 sign", 1500),
    Measured(0.78, 20, 4, "topk 0.1 sign", 1500),
    Measured(-0.13, 20, 4, "topk 0.1 sign", 1500, own_residual="none"),
    Measured(0.78, 20, 4, "int4", 1500, own_residual="none"),
    Measured(0.70, 22, 4, "int4", 1500),
    Measured(0.61, 6, 6, "sign", 1500, own_residual="none"),
    Measured(-11.5, 20, 20, "int4", 1500, own_share="none", own_residual="none"),
)


def nearest(outer: OuterSettings, delay: int) -> Measured:
    """The row of the most similar settings; of equally similar ones the longest run.

    Args:
        delay: inner steps after which the average is applied.
    """
    codec = _codec(outer)

    def distance(row: Measured) -> tuple[float, int]:
        away = abs(math.log(row.local_steps / outer.local_steps))
        away += abs(math.log((1 + row.delay) / (1 + delay)))
        away += 8 * (row.own_share != outer.own_share) + 4 * (_kind(row.codec) != _kind(codec))
        away += 2 * (row.own_residual != outer.own_residual) + 0.5 * (row.codec != codec)
        return away, -row.steps

    return min(ROWS, key=distance)


def expected_kept(row: Measured, outer: OuterSettings, delay: int) -> float:
    """`row.kept`, less what goes beyond it: a longer round, an average that comes later than a
    fifth of it, fewer entries. All three are taken to cost the same per doubling."""
    longer = math.log2(max(1.0, outer.local_steps / row.local_steps))
    late = delay > math.ceil(EARLY * outer.local_steps)
    later = math.log2(max(1.0, delay / row.delay)) if late else 0.0
    sparser = math.log2(max(1.0, _fraction(row.codec) / _fraction(_codec(outer))))
    return row.kept - LOST_PER_DOUBLING * (longer + later + sparser)


def label(codec: CodecSettings) -> str:
    """A codec in a word or two, as in the rows."""
    if isinstance(codec, TopKCodec):
        return f"topk {codec.fraction:g} {codec.values.type}"
    return codec.type


def _codec(outer: OuterSettings) -> str:
    return label(outer.compression.matrices)


def _fraction(codec: str) -> float:
    """Share of the entries that are sent."""
    return float(codec.split()[1]) if codec.startswith("topk") else 1.0


def _kind(codec: str) -> str:
    """`topk 0.1 sign` without its number."""
    return codec.partition(" ")[0] + codec.rpartition(" ")[2]
