"""Warnings about rounds that are not what the algorithm's convergence rests on."""

import logging

from dsx.outer.report import RoundReport
from dsx.settings.dsx_block import OuterSettings

log = logging.getLogger(__name__)

LARGEST_RELATIVE_ERROR = 0.95
"""Above it the codec sends less than a tenth (1 - 0.95^2) of the update's energy."""
LARGEST_RESIDUAL_RATIO = 3.0
"""Above it, and growing, the error feedback holds several rounds: what is applied is that stale."""
SMALLEST_COSINE = 0.02
"""Below it a cluster's pseudo-gradient and the average have no direction in common: with C clusters
that agree on nothing it is still 1 / sqrt(C)."""
LARGEST_STALENESS = 0.5
"""Of a round, where a cluster does not keep its own progress: beyond, training was seen to lose
most of what a second cluster brings, or to diverge."""
_SILENT_ROUNDS = 50
"""A warning is repeated after so many rounds at the earliest."""


class Diagnosis:
    """Looks at one report after the other."""

    def __init__(self, settings: OuterSettings) -> None:
        self._settings = settings
        self._warned: dict[str, int] = {}
        self._last_residual = float("inf")

    def look_at(self, report: RoundReport) -> list[str]:
        """The warnings that are due, each with advice; they are logged, too."""
        found = self._find(report)
        self._last_residual = report.residual_ratio
        due = []
        for kind, text in found.items():
            last = self._warned.get(kind)
            if last is None or report.round - last >= _SILENT_ROUNDS:
                self._warned[kind] = report.round
                due.append(f"round {report.round}: {text}")
                log.warning("%s", due[-1])
        return due

    def _find(self, report: RoundReport) -> dict[str, str]:
        found = {}
        if report.relative_error > LARGEST_RELATIVE_ERROR:
            found["relative error"] = (
                f"the codec's relative error is {report.relative_error:.2f} (at most "
                f"{LARGEST_RELATIVE_ERROR} is sound): almost nothing of the update is sent; give "
                "dsx.outer.compression more bits, a larger fraction or a higher rank"
            )
        if LARGEST_RESIDUAL_RATIO < report.residual_ratio > self._last_residual:
            found["residual"] = (
                f"the error feedback is {report.residual_ratio:.1f} times the averaged "
                f"pseudo-gradient and grows (at most {LARGEST_RESIDUAL_RATIO:g} is sound): it "
                "holds updates of many rounds ago; lower dsx.outer.compression.feedback_decay "
                "(0.95), or compress less"
            )
        contributed = report.pseudo_gradient_norm > 0 and report.cosine != 0
        if len(report.participants) > 1 and contributed and report.cosine < SMALLEST_COSINE:
            found["cosine"] = (
                f"the cosine between this cluster's pseudo-gradient and the average is "
                f"{report.cosine:.3f} (at least {SMALLEST_COSINE} is sound): the clusters pull in "
                "different directions; use fewer dsx.outer.local_steps, a lower inner learning "
                "rate or larger batches"
            )
        staleness = report.delay / max(1, report.local_steps)
        if self._settings.own_share == "none" and staleness > LARGEST_STALENESS:
            found["staleness"] = (
                f"averages come {report.delay} inner steps late, in rounds of "
                f"{report.local_steps}, and own progress is not kept until then "
                '(dsx.outer.own_share "none"): at most half a round is sound; set own_share to '
                '"all", lower dsx.outer.delay, or lower dsx.outer.lr and momentum'
            )
        return found
