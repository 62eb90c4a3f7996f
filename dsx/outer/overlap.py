"""When an average is applied, and what a cluster trains on until then."""

import math
from collections import deque
from typing import Literal

Delay = int | Literal["auto", "round"]
OwnShare = Literal["none", "all", "mean"]

# An exchange is slower now and then; the delay follows the slowest of the last few.
_REMEMBERED_ROUNDS = 3
# Room for the jitter of step times: an average that comes early waits at no cost, a late one
# stalls the step.
DELAY_MARGIN = 1.25


class DelayClock:
    """After how many inner steps of the next round an average is applied.

    The answer depends on the settings and on what all clusters told each other in committed
    rounds, so that every rank of every cluster gives the same one.
    """

    def __init__(self, delay: Delay) -> None:
        self._delay = delay
        self._fitting: deque[int] = deque(maxlen=_REMEMBERED_ROUNDS)

    def steps(self, local_steps: int) -> int:
        """Inner steps, 0 to `local_steps` (which is the end of the round)."""
        if self._delay == "round":
            return local_steps
        if self._delay == "auto":
            # Until something is measured: a fifth of a round costs nothing in quality.
            longest = max(self._fitting, default=math.ceil(local_steps / 5))
            return max(1, min(longest, local_steps))
        return min(self._delay, local_steps)

    def observe(self, exchange_seconds: float, step_seconds: float) -> None:
        """Take note of the slowest exchange and the fastest inner step of all clusters."""
        if exchange_seconds > 0 and step_seconds > 0:
            self._fitting.append(math.ceil(DELAY_MARGIN * exchange_seconds / step_seconds))

    def state_dict(self) -> list[int]:
        return list(self._fitting)

    def load_state_dict(self, state: list[int]) -> None:
        self._fitting.clear()
        self._fitting.extend(state)


def own_share(kind: OwnShare, lr: float, weight: float) -> float:
    """phi: the part of its own displacement that a cluster keeps while that is on the wire.

    Args:
        kind: `none` (DiLoCoX), `all` (goes on from where it is), `mean` (its own part of the
            average to come stands in now; arXiv 2502.12996).
        lr: outer learning rate eta.
        weight: the cluster's last known weight w_c in the average.
    """
    if kind == "none":
        return 0.0
    return 1.0 if kind == "all" else lr * weight
