"""The outer engine: counts inner steps, and exchanges pseudo-gradients in the background.

DiLoCoX (arXiv 2506.21263), with two independent settings for its overlap: `delay`, when an
average is applied, and `own_share`, what a cluster trains on until then. theta changes by
committed averages only; whatever a cluster adds for itself is a local view.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Exchange
from dsx.outer.agreement import Agreement, AloneAgreement
from dsx.outer.averaging import Averager
from dsx.outer.digest import join_digests, shapes_digest
from dsx.outer.optimizer import OuterOptimizer
from dsx.outer.overlap import DelayClock, own_share
from dsx.outer.round import Contribution, Outcome, RoundExchange
from dsx.outer.state import Progress, SharedState
from dsx.outer.weights import LocalWeights
from dsx.settings.dsx_block import OuterSettings

log = logging.getLogger(__name__)

_START_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class RoundReport:
    """What one committed round cost and did; the same on every rank of a cluster."""

    round: int
    """Number of this round, from 1."""
    participants: tuple[str, ...]
    bytes_sent: int
    """Over the slow link, by all ranks of this cluster."""
    bytes_received: int
    exchange_seconds: float
    """Of the slowest rank, from agreed membership to commit."""
    blocked_seconds: float
    """For which the inner steps of this cluster stood still."""
    local_steps: int
    delay: int
    """Inner steps made between the boundary and the arrival of the average."""
    pseudo_gradient_norm: float
    relative_error: float
    """||v - decode(encode(v))|| / ||v||: what the codec lost of what it was given."""
    residual_ratio: float
    """||e|| / ||Delta||: the error feedback over the averaged pseudo-gradient."""
    cosine: float
    """Between this cluster's pseudo-gradient and the average; 0 where it sent none."""
    shared_digest: str
    """Of theta, independent of the layout; equal on all clusters."""
    tokens_total: int


@dataclass
class _Flight:
    """A pseudo-gradient on the wire."""

    future: "Future[Outcome]"
    start: dict[str, torch.Tensor]
    """s: the local weights from which training went on at the boundary."""
    end: dict[str, torch.Tensor]
    """The local weights that the round ended with; `start` itself when all was kept."""
    local_steps: int
    delay: int
    norm: float


class OuterEngine:
    """One rank's part of the exchange between clusters.

    Call `start` once, `advance` and then `settle` after every inner step, `finish` at the end.
    (`advance` never waits for a pseudo-gradient that was launched by the same call, so that one
    thread can drive many clusters in lockstep.)

    Args:
        settings: the `dsx.outer` block.
        weights: the inner training's fp32 masters.
        exchange: this rank's outer group.
        identity: digest of everything that clusters must have in common.
        seed: of the codecs that need one.
        vocab_size: rows of the embedding, whose codec may be another than that of other matrices.
        agreement: collectives among the ranks of this cluster.
        on_commit: called after a committed round was applied, with nothing in flight: the moment
            for an evaluation or a checkpoint.
    """

    def __init__(
        self,
        settings: OuterSettings,
        weights: LocalWeights,
        exchange: Exchange,
        identity: str = "",
        seed: int = 0,
        vocab_size: int | None = None,
        agreement: Agreement | None = None,
        on_commit: Callable[[RoundReport], None] | None = None,
    ) -> None:
        self.step_in_round = 0
        self.rounds_left_out = 0
        self._settings = settings
        self._weights = weights
        self._exchange = exchange
        self._agreement = agreement or AloneAgreement()
        self._on_commit = on_commit
        self._clock = DelayClock(settings.delay)
        self.state = SharedState(OuterOptimizer(weights.fetch(), settings.lr, settings.momentum))
        self.averager = Averager(settings.compression, weights.shapes(), seed, vocab_size)
        self._round = RoundExchange(
            self.state,
            exchange,
            self.averager,
            shapes_digest(weights.shapes(), identity),
            settings.min_clusters,
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outer-exchange")
        self._flight: _Flight | None = None
        self._share = 1.0
        self._tokens = 0
        self._seconds = 0.0
        self._last_exchange_seconds = 0.0
        self._blocked_seconds = 0.0
        self._counted = (0, 0)

    @property
    def theta(self) -> dict[str, torch.Tensor]:
        """The shared weights of this rank's share, after the newest committed round."""
        return self.state.optimizer.theta

    @property
    def round(self) -> int:
        """Rounds committed so far."""
        return self.state.progress.round

    def start(self) -> tuple[str, ...]:
        """Meet the other clusters and take over the newest shared state among them.

        Returns:
            the clusters present, in the order in which everybody sums.

        Raises:
            ExchangeRefused: somebody trains something else.
        """
        while True:
            arrival = Contribution(None, 0, 0.0, 0.0, starting=True)
            outcome = self._worker.submit(self._round.run, arrival).result()
            if outcome.committed or len(outcome.clusters) >= self._settings.start_clusters:
                break
            time.sleep(_START_PAUSE_SECONDS)
        self._clock.load_state_dict(self.state.progress.delays)
        self._share = outcome.share or 1 / len(outcome.clusters)
        self._weights.store(self.theta)
        return outcome.clusters

    def advance(self, tokens: int, seconds: float) -> RoundReport | None:
        """One inner step was made: apply an average that is due, end a round that is full.

        Args:
            tokens: trained in that step by the whole cluster.
            seconds: that it took.
        """
        self.step_in_round += 1
        self._tokens += tokens
        self._seconds += seconds
        report = None
        if self._flight is not None and self.step_in_round >= self._flight.delay > 0:
            report = self._arrive()
        if self.step_in_round >= self._settings.local_steps:
            self._launch()
        return report

    def settle(self) -> RoundReport | None:
        """Wait for an average that must be applied before the next inner step."""
        if self._flight is not None and self._flight.delay == 0:
            return self._arrive()
        return None

    def finish(self) -> list[RoundReport]:
        """Flush: apply what is in flight, then exchange and apply what is left (collective)."""
        reports = []
        if self._flight is not None:
            reports.append(self._arrive())
        if self.step_in_round > 0:
            self._launch()
            reports.append(self._arrive())
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Leave the exchange; the state stays readable."""
        self._exchange.close()
        self._worker.shutdown(wait=True)

    def load(self, tensors: dict[str, torch.Tensor], progress: Progress, step: int) -> None:
        """Go on from a checkpoint that was taken with nothing in flight.

        Args:
            tensors: as `state.tensors()` names them.
            step: inner steps already made in the present round.
        """
        self.state.load(tensors, progress)
        self._round.rehash()
        self.step_in_round = step

    def _launch(self) -> None:
        """The boundary: send `delta = theta - x`, and go on from `s = theta - phi delta`."""
        began = time.perf_counter()
        theta = self.theta
        end = self._weights.fetch()
        delta: dict[str, torch.Tensor] | None
        delta = {name: theta[name] - value for name, value in end.items()}
        norm = self._norm(delta)
        delay = self._clock.steps(self._settings.local_steps)
        steps = self.step_in_round
        (step_seconds, exchange_seconds) = self._agreement.maximum(
            [self._seconds / steps, self._last_exchange_seconds]
        )
        start = end
        if not math.isfinite(norm):
            # Nothing sound to send: this cluster sits the round out and goes on from theta.
            log.warning("the pseudo-gradient of round %d is not finite: left out", self.round)
            self.rounds_left_out += 1
            delta, self._tokens = None, 0
            start = end = {name: value.clone() for name, value in theta.items()}
            self._weights.store(start)
        elif delay > 0 and self._settings.own_share != "all":
            phi = own_share(self._settings.own_share, self._settings.lr, self._share)
            start = {name: theta[name].sub(value, alpha=phi) for name, value in delta.items()}
            self._weights.store(start)
        contribution = Contribution(delta, self._tokens, step_seconds, exchange_seconds)
        future = self._worker.submit(self._round.run, contribution)
        self._flight = _Flight(future, start, end, steps, delay, norm)
        self.step_in_round = 0
        self._tokens = 0
        self._seconds = 0.0
        self._blocked_seconds += time.perf_counter() - began

    def _arrive(self) -> RoundReport | None:
        """The average is due: wait for it, and keep what was made since the boundary."""
        began = time.perf_counter()
        flight = self._flight
        assert flight is not None
        self._flight = None
        try:
            outcome = flight.future.result()
        except ExchangeRefused:
            raise
        except ExchangeError as error:
            log.warning("the pseudo-gradient stays here and joins the next one: %s", error)
            self._rebase(flight.start, flight.end)
            return None
        if not outcome.committed:
            self._rebase(flight.start, flight.end)
            return None
        self._rebase(flight.start, self.theta)
        self._share = outcome.share
        self._last_exchange_seconds = outcome.exchange_seconds
        self._clock.observe(outcome.slowest_exchange, outcome.fastest_step)
        self.state.progress.delays = self._clock.state_dict()
        self._blocked_seconds += time.perf_counter() - began
        report = self._report(flight, outcome)
        if self._on_commit is not None:
            self._on_commit(report)
        return report

    def _rebase(self, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
        """`x = new - (old - x)`: go over to `new`, keeping the displacement made from `old`."""
        if self.step_in_round == 0:
            self._weights.store(new)
            return
        if old is new:
            return
        local = self._weights.fetch()
        for name, value in local.items():
            local[name] = new[name] - (old[name] - value)
        self._weights.store(local)

    def _norm(self, delta: dict[str, torch.Tensor]) -> float:
        squares = sum(float(value.double().square().sum()) for value in delta.values())
        return self._agreement.total([squares])[0] ** 0.5

    def _report(self, flight: _Flight, outcome: Outcome) -> RoundReport:
        traffic = self._exchange.traffic
        moved = (traffic.sent - self._counted[0], traffic.received - self._counted[1])
        self._counted = (traffic.sent, traffic.received)
        sent, received, residual, *sums = self._agreement.total(
            [
                *moved,
                self.averager.residual_square(),
                *outcome.moments.values(),
                *outcome.theta_digest,
            ]
        )
        update, error, delta, mean, product, *parts = sums
        slowest, blocked = self._agreement.maximum(
            [outcome.exchange_seconds, self._blocked_seconds]
        )
        self._blocked_seconds = 0.0
        return RoundReport(
            round=self.round,
            participants=outcome.contributors,
            bytes_sent=int(sent),
            bytes_received=int(received),
            exchange_seconds=slowest,
            blocked_seconds=blocked,
            local_steps=flight.local_steps,
            delay=flight.delay,
            pseudo_gradient_norm=flight.norm,
            relative_error=_ratio(error, update) ** 0.5,
            residual_ratio=_ratio(residual, mean) ** 0.5,
            cosine=_ratio(product, (delta * mean) ** 0.5),
            shared_digest=join_digests(parts),
            tokens_total=self.state.progress.tokens_total,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
