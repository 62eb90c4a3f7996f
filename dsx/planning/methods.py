"""The same cluster and link under other recipes: what each sends, and when inner steps wait for it.

* `allreduce`: every step's bf16 gradients, clusters as one ring: 2 (C - 1) / C of them out of each.
* `opendiloco` (arXiv 2407.07852): fp16 pseudo-gradients after H steps, all stages wait. The recipe
  has no pipeline; here it is given the same one.
* `dilocox` (arXiv 2506.21263): rank 2048, int4, H = 125, a round of delay.
"""

from dataclasses import dataclass

from dsx.planning.exchange import Traffic
from dsx.planning.time import Link, round_time

PUBLISHED_STEPS = 125
PUBLISHED_RANK = 2048
_DAY = 86_400


@dataclass(frozen=True)
class MethodPlan:
    """One recipe on all clusters."""

    method: str
    local_steps: int
    delay: int
    bytes_per_round: float
    """That each cluster sends."""
    exchange_seconds: float
    round_seconds: float
    tokens_per_second: float
    """Of all clusters."""
    utilization: float
    """Over what the clusters would train without any exchange."""
    tokens_per_round: float

    @property
    def bytes_per_day(self) -> float:
        return self.bytes_per_round / self.round_seconds * _DAY

    @property
    def bytes_per_token(self) -> float:
        """Sent by one cluster, per token of all clusters."""
        return self.bytes_per_round / self.tokens_per_round

    def days(self, tokens: float) -> float:
        """Until `tokens` tokens are trained."""
        return tokens / self.tokens_per_second / _DAY


def allreduce_bytes(parameters: int, clusters: int, width: int = 2) -> float:
    """That each cluster sends to average `width` bytes a parameter by ring all-reduce."""
    return 2 * (clusters - 1) / clusters * width * parameters


def gather_bytes(parameters: int, clusters: int, width: int = 2) -> float:
    """That each cluster sends besides, where each updates a part of the weights (ZeRO-1) and hands
    it to the others."""
    return (clusters - 1) / clusters * width * parameters


def method_plan(
    method: str,
    step: float,
    tokens_per_step: float,
    local_steps: int,
    delay: int | str,
    sent: float,
    exchange: float,
    boundary: float = 0.0,
) -> MethodPlan:
    """`tokens_per_step`: of all clusters; `sent`: bytes of one cluster and round."""
    time = round_time(step, local_steps, delay, exchange, boundary)
    return MethodPlan(
        method=method,
        local_steps=local_steps,
        delay=time.delay,
        bytes_per_round=sent,
        exchange_seconds=exchange,
        round_seconds=time.seconds,
        tokens_per_second=local_steps * tokens_per_step / time.seconds,
        utilization=local_steps * step / time.seconds,
        tokens_per_round=local_steps * tokens_per_step,
    )


def others(
    parameters: int,
    clusters: int,
    step: float,
    tokens_per_step: float,
    link: Link,
    published: Traffic,
) -> list[MethodPlan]:
    """All-reduce, OpenDiLoCo and DiLoCoX; `published`: the latter's traffic."""
    dense = allreduce_bytes(parameters, clusters)
    steps = PUBLISHED_STEPS
    at_once = link.seconds(dense, 2 * (clusters - 1))
    low_rank = link.seconds(published.bytes, published.roundtrips)
    return [
        method_plan("allreduce", step, tokens_per_step, 1, 0, dense, at_once),
        method_plan("opendiloco", step, tokens_per_step, steps, 0, dense, at_once),
        method_plan("dilocox", step, tokens_per_step, steps, "round", published.bytes, low_rank),
    ]
