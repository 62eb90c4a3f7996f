"""Rules for the inner steps of a round (H)."""

import math
import statistics
from collections.abc import Mapping
from typing import Protocol

from dsx.outer.state import Progress
from dsx.settings.adapt_block import LinkSteps, PaperSteps
from dsx.settings.codec_block import LowRankCodec
from dsx.settings.dsx_block import OuterSettings

_REMEMBERED_ROUNDS = 5
_FEWEST_ROUNDS = 3
"""Measured rounds before the first decision: the first exchanges are slower, if anything."""
_SLACK = 0.8
"""A round that is longer than needed by less than this stays: else jitter would move it about."""
_SAME_PACE = 0.95
"""A cluster that is slower by less than this is not slower: so much step times jitter."""


class StepsRule(Protocol):
    """Chooses the inner steps of a round."""

    def clamp(self, local_steps: int) -> int:
        """The nearest number that the rule allows."""
        ...

    def next_steps(self, progress: Progress, exchange_seconds: float, step_seconds: float) -> int:
        """Inner steps from now on, the rank being `progress.next_rank`.

        Args:
            exchange_seconds: of the slowest exchange of the last round; 0 when not measured.
            step_seconds: of the fastest cluster; 0 when not measured.
        """
        ...


class FixedRule:
    """Always the same."""

    def __init__(self, local_steps: int) -> None:
        self._local_steps = local_steps

    def clamp(self, local_steps: int) -> int:
        return self._local_steps

    def next_steps(self, progress: Progress, exchange_seconds: float, step_seconds: float) -> int:
        return self._local_steps


class PaperRule:
    """H = H_1 r / r_1, rounded up (DiLoCoX, arXiv 2506.21263)."""

    def __init__(self, first_steps: int, first_rank: int) -> None:
        self._first_steps = first_steps
        self._first_rank = first_rank

    def clamp(self, local_steps: int) -> int:
        return max(1, local_steps)

    def next_steps(self, progress: Progress, exchange_seconds: float, step_seconds: float) -> int:
        return max(1, -(-self._first_steps * progress.next_rank // self._first_rank))


class LinkRule:
    """The smallest H for which exchange <= share x H x step, by the median of the last rounds."""

    def __init__(self, settings: LinkSteps) -> None:
        self._settings = settings

    def clamp(self, local_steps: int) -> int:
        return self._settings.clamp(local_steps)

    def next_steps(self, progress: Progress, exchange_seconds: float, step_seconds: float) -> int:
        if exchange_seconds > 0 and step_seconds > 0:
            ratio = exchange_seconds / step_seconds
            progress.link_window = [*progress.link_window, ratio][-_REMEMBERED_ROUNDS:]
        current = progress.next_local_steps
        if len(progress.link_window) < _FEWEST_ROUNDS:
            return self.clamp(current)
        exact = statistics.median(progress.link_window) / self._settings.share
        # 5.000000000001 is 5: the quotient of two measured times is not more exact than that.
        needed = math.ceil(exact * (1 - 1e-9))
        if _SLACK * current <= needed <= current:
            return self.clamp(current)
        return self.clamp(needed)


def build_steps_rule(settings: OuterSettings) -> StepsRule:
    """The rule that `outer.adapt.local_steps` and `outer.delay` ask for."""
    rule = settings.steps_rule
    if isinstance(rule, LinkSteps):
        return LinkRule(rule)
    if isinstance(rule, PaperSteps):
        codec = settings.compression.matrices
        assert isinstance(codec, LowRankCodec)  # the settings refuse anything else
        return PaperRule(settings.local_steps, codec.rank)
    return FixedRule(settings.local_steps)


def balanced_steps(local_steps: int, paces: Mapping[str, float], cluster: str) -> int:
    """What a slower cluster does of a round of `local_steps`, so that the fastest need not wait.

    Args:
        paces: seconds of an inner step, by cluster.
        cluster: the one to answer for; as many as the fastest when nothing is known about it.
    """
    own = paces.get(cluster, 0.0)
    if own <= 0:
        return local_steps
    pace = min(paces.values()) / own
    return local_steps if pace > _SAME_PACE else max(1, math.floor(local_steps * pace))


def next_paces(known: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Seconds of an inner step by cluster: halfway from what was known to the newest."""
    return {name: (known.get(name, value) + value) / 2 for name, value in measured.items()}
