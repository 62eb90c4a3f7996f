"""Makes the report of a round from what the ranks of a cluster know."""

from dsx.exchange.interface import Exchange
from dsx.outer.agreement import Agreement
from dsx.outer.diagnosis import Diagnosis
from dsx.outer.digest import join_digests
from dsx.outer.own_state import Flight
from dsx.outer.report import RoundReport
from dsx.outer.round import Outcome
from dsx.outer.state import Progress
from dsx.settings.dsx_block import OuterSettings


class RoundReporter:
    """One rank's part; what it counts runs from one report to the next."""

    def __init__(self, settings: OuterSettings, agreement: Agreement, exchange: Exchange) -> None:
        self.blocked_seconds = 0.0
        """For which inner steps stood still since the last report."""
        self.measured: list[float] = []
        """What the rank rule measured in the last round, summed over the cluster's ranks."""
        self._diagnosis = Diagnosis(settings)
        self._agreement = agreement
        self._exchange = exchange
        self._counted = (0, 0)

    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank sent and received since the last report."""
        traffic = self._exchange.traffic
        return traffic.sent - self._counted[0], traffic.received - self._counted[1]

    def restore(self, sent: int, received: int) -> None:
        """A cluster goes on that had counted so much when it was saved."""
        if self._agreement.is_first:
            self._counted = (-sent, -received)

    def report(
        self, flight: Flight, outcome: Outcome, residual_square: float, progress: Progress
    ) -> RoundReport:
        """Of a round that was committed and applied; warns where it was unsound (once per
        cluster). Collective over the cluster.

        Args:
            residual_square: ||e||^2 of this rank's error feedback.
            progress: after the round.
        """
        moments, digest = outcome.moments.values(), outcome.theta_digest
        sums = self._agreement.total(
            [*self.traffic(), residual_square, *moments, *digest, *outcome.measured]
        )
        self._counted = (self._exchange.traffic.sent, self._exchange.traffic.received)
        (sent, received, residual, update, error, delta, mean, product), rest = sums[:8], sums[8:]
        self.measured = rest[len(digest) :]
        slowest, blocked = self._agreement.maximum([outcome.exchange_seconds, self.blocked_seconds])
        self.blocked_seconds = 0.0
        report = RoundReport(
            round=progress.round,
            participants=outcome.contributors,
            bytes_sent=int(sent),
            bytes_received=int(received),
            exchange_seconds=slowest,
            blocked_seconds=blocked,
            local_steps=flight.record.local_steps,
            rank=flight.record.rank,
            delay=flight.record.delay,
            pseudo_gradient_norm=flight.record.norm,
            relative_error=_ratio(error, update) ** 0.5,
            residual_ratio=_ratio(residual, mean) ** 0.5,
            cosine=_ratio(product, (delta * mean) ** 0.5),
            shared_digest=join_digests(rest[: len(digest)]),
            tokens_total=progress.tokens_total,
            leases=progress.leases,
        )
        if self._agreement.is_first:
            self._diagnosis.look_at(report)
        return report


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
