"""The outer engine: counts inner steps, and exchanges pseudo-gradients in the background.

DiLoCoX (arXiv 2506.21263), with two independent settings for its overlap: `delay`, when an
average is applied, and `own_share`, what a cluster trains on until then. theta changes by
committed averages only; whatever a cluster adds for itself is a local view.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from dsx.errors import ExchangeError
from dsx.exchange.interface import Exchange
from dsx.outer.agreement import Agreement, AloneAgreement, total_norm
from dsx.outer.averaging import Averager
from dsx.outer.control import Control
from dsx.outer.deadlines import Deadlines
from dsx.outer.identity import Identity
from dsx.outer.keeping import Keeper
from dsx.outer.leases import Ranges, contains, count, join, split, without
from dsx.outer.optimizer import OuterOptimizer
from dsx.outer.overlap import DelayClock, own_share
from dsx.outer.own_state import Flight, OwnState
from dsx.outer.report import RoundReport
from dsx.outer.reporting import RoundReporter
from dsx.outer.round import Contribution, Outcome, RoundExchange
from dsx.outer.snapshot import FlightRecord, Snapshot, WantsShared
from dsx.outer.state import Progress, SharedState
from dsx.outer.steps import StepCounter
from dsx.outer.weights import LocalWeights, rebase
from dsx.settings.dsx_block import OuterSettings
from dsx.spans import span

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
_STOP_LOOK_SECONDS = 0.2
"""How often a rank that waits for other clusters looks whether it is to end."""


class Interrupted(Exception):
    """The process was asked to end while the engine waited for other clusters. Its state is sound:
    it can be saved, and goes on from there."""


class OuterEngine:
    """One rank's part of the exchange between clusters.

    Call `start` once, `advance` and then `settle` after every inner step, `finish` at the end.
    (`advance` never waits for a pseudo-gradient that was launched by the same call, so that one
    thread can drive many clusters in lockstep.)

    Args:
        settings: the `dsx.outer` block.
        weights: the inner training's fp32 masters.
        exchange: this rank's outer group.
        identity: everything that clusters must have in common, by name.
        step_samples: that this cluster trains in an inner step; 0: it draws none.
        seed: of the codecs that need one.
        vocab_size: rows of the embedding, whose codec may be another than that of other matrices.
        agreement: collectives among the ranks of this cluster.
        on_commit: called after a committed round was applied, with nothing in flight: the moment
            for an evaluation or a checkpoint.
        stop_wanted: whether this rank was asked to end; one rank that was ends the waiting of all.
        clock: seconds, by which exchanges are measured; another one than the real for a link that
            is only modelled.
    """

    def __init__(
        self,
        settings: OuterSettings,
        weights: LocalWeights,
        exchange: Exchange,
        identity: Mapping[str, object] | None = None,
        step_samples: int = 0,
        seed: int = 0,
        vocab_size: int | None = None,
        agreement: Agreement | None = None,
        on_commit: Callable[[RoundReport], None] | None = None,
        stop_wanted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._step_samples = step_samples
        self._weights = weights
        self._exchange = exchange
        self._agreement = agreement or AloneAgreement()
        self._on_commit = on_commit
        self._stop_wanted = stop_wanted
        self._restored: tuple[int, int] | None = None
        self._failed = False
        self._own = OwnState(DelayClock(settings.delay))
        self._control = Control(settings, vocab_size)
        momentum = settings.momentum, settings.momentum_warmup_steps
        self.state = SharedState(OuterOptimizer(weights.fetch(), settings.lr, *momentum))
        self.averager = Averager(
            settings.compression, weights.shapes(), seed, vocab_size, self._control.rank_rule
        )
        self._deadlines = Deadlines(settings)
        self._round = RoundExchange(
            self.state,
            exchange,
            self.averager,
            Identity(identity or {}, weights.shapes()),
            settings,
            step_samples,
            self._control,
            self._deadlines,
            clock,
        )
        self._name = ""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outer-exchange")
        self._reporter = RoundReporter(settings, self._agreement, exchange)
        self._keeper = Keeper(
            settings.delay,
            self.state,
            self._round,
            self.averager,
            self._control,
            self._agreement,
            self._reporter,
        )

    @property
    def theta(self) -> dict[str, torch.Tensor]:
        """The shared weights of this rank's share, after the newest committed round."""
        return self.state.optimizer.theta

    @property
    def round(self) -> int:
        """Rounds committed so far."""
        return self.state.progress.round

    @property
    def steps(self) -> StepCounter:
        """Where this cluster is among the inner steps of the run."""
        return self._own.steps

    @property
    def rounds_left_out(self) -> int:
        """Rounds for which this cluster had nothing finite to send."""
        return self._own.rounds_left_out

    @property
    def step_in_round(self) -> int:
        """Own inner steps since the last boundary."""
        return self.steps.in_round

    @property
    def unsent_samples(self) -> Ranges:
        """Samples that were trained here and are not part of theta yet, so far as is known."""
        flight = self._own.flight
        return [*(flight.record.trained if flight is not None else []), *self._own.trained]

    @property
    def is_flushed(self) -> bool:
        """Whether theta holds everything that was trained here."""
        return self._own.flight is None and self.step_in_round == 0

    @property
    def goes_on(self) -> bool:
        """After `start`: whether a restored state was what the other clusters go on from, too."""
        return self._restored is not None

    def watch(self, on_phase: Callable[[str], None]) -> None:
        """Call `on_phase` from the exchange's thread; see `RoundExchange.on_phase`."""
        self._round.on_phase = on_phase

    def start(self) -> tuple[str, ...]:
        """Meet the other clusters and take over the newest shared state among them.

        After `restore`, call `go_on` before the first inner step.

        Returns:
            the clusters present, in the order in which everybody sums.

        Raises:
            ExchangeRefused: somebody trains something else.
            Interrupted: the process is to end.
            SettingsError: a rule of `adapt` can't be followed with this model.
        """
        self._control.prepare(self.state.progress, self._weights.shapes(), self._agreement)
        while True:
            arrival = Contribution(None, 0, 0.0, 0.0, starting=True)
            future = self._send(arrival)
            self._await(future)
            outcome = future.result()
            if outcome.problem:
                raise ExchangeError(outcome.problem)
            if outcome.committed or len(outcome.clusters) >= self._settings.start_clusters:
                break
            self._pause()
        self._name = outcome.cluster
        if self._restored is not None:
            if self._keeper.goes_on(self._own, self._restored, outcome, self._send):
                return outcome.clusters
            flight = self._own.flight
            log.warning(
                "the others are at round %d: %d inner steps made here since the last exchange are "
                "left out",
                self.round,
                self.step_in_round + (flight.record.local_steps if flight is not None else 0),
            )
            self._own.forget()
        self._restored = None
        self._own.todo = self._lease(outcome) or []
        progress = self.state.progress
        self.steps.go_to(progress.steps)
        self._begin_round(progress.local_steps)
        self._own.delays.load_state_dict(progress.delays)
        self._own.share = outcome.share or 1 / len(outcome.clusters)
        self._weights.store(self._base())
        return outcome.clusters

    def go_on(self) -> None:
        """After a restart: do what was due when the state was saved (collective)."""
        self._pass_on()
        self.settle()

    def draw(self) -> Sequence[int]:
        """The samples of the next inner step, as positions in the run's order.

        When the lease ends, because rounds fail again and again, this waits for one that is
        committed: what another cluster may train is nobody's to take.

        Raises:
            Interrupted: the process is to end.
        """
        own = self._own
        short = False
        while count(own.todo) < self._step_samples * (self.steps.own - self.steps.in_round):
            if short:
                self._pause()
            else:
                log.warning("all samples on lease are trained: waiting for the other clusters")
            short = True
            if own.flight is None:
                self._launch()
            self._arrive()
        step, own.todo = split(own.todo, self._step_samples)
        own.trained = join([*own.trained, *step])
        return [position for start, end in step for position in range(start, end)]

    def advance(self, tokens: int, seconds: float) -> RoundReport | None:
        """One inner step was made: apply an average that is due, end a round that is full.

        Args:
            tokens: trained in that step by the whole cluster.
            seconds: that it took.
        """
        self.steps.advance()
        self._own.tokens += tokens
        self._own.seconds += seconds
        return self._pass_on()

    def _pass_on(self) -> RoundReport | None:
        report = None
        if self._own.flight is not None and self.step_in_round >= self._own.flight.record.delay > 0:
            report = self._arrive()
        if self.steps.is_full:
            with span("outer step"):
                self._launch()
        return report

    def settle(self) -> RoundReport | None:
        """Wait for an average that must be applied before the next inner step."""
        if self._own.flight is not None and self._own.flight.record.delay == 0:
            return self._arrive()
        return None

    def finish(self) -> list[RoundReport]:
        """Flush: apply what is in flight, then exchange and apply what is left, until no cluster
        that is there has anything left (collective)."""
        reports = []
        if self._own.flight is not None:
            reports.append(self._arrive())
        ends = time.monotonic() + self._deadlines.round(self.state.progress)
        while True:
            self._launch()
            reports.append(self._arrive())
            nothing_left = reports[-1] is None and not self._failed and self._own.tokens == 0
            late = self._agreement.maximum([float(time.monotonic() > ends)])[0] > 0
            if nothing_left or late:
                break
        if self._own.tokens > 0:
            log.warning("the shared weights lack what was trained here last")
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Leave the exchange; the state stays readable."""
        self._exchange.close()
        self._worker.shutdown(wait=True)

    # ------------------------------------------------------------------ saving and restoring

    def wait_for_flight(self, seconds: float) -> None:
        """Give an exchange in the air the time to end, so that a state that is saved after it fits
        those of the other clusters (collective)."""
        if self._own.flight is not None:
            wait([self._own.flight.future], timeout=seconds)

    def snapshot(self, wants_shared: WantsShared = lambda round_, digest: True) -> Snapshot:
        """The state at this moment, between two calls of other methods (collective).

        An exchange in the air goes on: it is in the snapshot as one that is still to be made, or,
        when its average is in theta already, as one that is over.
        """
        return self._keeper.copy(self._own, wants_shared)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, of whatever layout; call it before `start`.

        Args:
            snapshot: with at least the tensors that this rank owns; without a `record`, what is
                shared alone is taken over.
        """
        self._control.prepare(snapshot.progress, self._weights.shapes(), self._agreement)
        own = self._keeper.restore(snapshot, self._base)
        if own is not None:
            self._own = own
            self._restored = self.state.progress.version

    def take_over(self, shared: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """After `restore`: go on from a newer shared state, that another cluster has saved.

        Args:
            shared: as `SharedState.load` takes it.
        """
        self.state.load(shared, progress)
        self._round.rehash()

    # ------------------------------------------------------------------ a round's two ends

    def _launch(self) -> None:
        """The boundary: send `delta = r - x`, r being what the round was trained on (theta, or
        theta - e), and go on from `s = r - phi delta`."""
        began = time.perf_counter()
        own, steps = self._own, self.steps
        base = self._base()
        end = self._weights.fetch()
        delta = {name: base[name] - value for name, value in end.items()}
        norm = total_norm(delta, self._agreement)
        # Of the newest committed round, whose average was applied before: the same everywhere.
        progress = self.state.progress
        made, step = steps.in_round, steps.step
        self._begin_round(progress.next_local_steps)
        # Of the next round, in which the average is to be applied.
        delay = steps.own_part(own.delays.steps(steps.nominal))
        (step_seconds, exchange_seconds) = self._agreement.maximum(
            [own.seconds / max(1, made), own.last_exchange_seconds]
        )
        start = end
        sound = math.isfinite(norm)
        if not sound:
            # Nothing sound to send: this cluster sits the round out and goes on from r.
            log.warning("the pseudo-gradient of round %d is not finite: left out", self.round)
            own.rounds_left_out += 1
            own.tokens = 0
            own.todo, own.trained = join([*own.todo, *own.trained]), []
            start = end = {name: value.clone() for name, value in base.items()}
            self._weights.store(start)
        elif delay > 0 and self._settings.own_share != "all":
            phi = own_share(self._settings.own_share, self._settings.lr, own.share)
            start = {name: base[name].sub(value, alpha=phi) for name, value in delta.items()}
            self._weights.store(start)
        record = FlightRecord(
            local_steps=made,
            delay=delay,
            norm=norm,
            base_round=self.round,
            tokens=own.tokens,
            trained=own.trained,
            step_seconds=step_seconds,
            exchange_seconds=exchange_seconds,
            measured_rank=own.measured_rank,
            step=step,
            rank=progress.rank,
            sound=sound,
        )
        flight = own.flight = Flight(Future(), start, end, record)
        own.tokens = 0
        own.trained = []
        own.seconds = own.measured_rank = 0.0
        flight.future = self._send(flight.contribution(delta if sound else None))
        self._reporter.blocked_seconds += time.perf_counter() - began

    def _send(self, contribution: Contribution) -> "Future[Outcome]":
        claim = [*self.unsent_samples, *self._own.todo]
        digest = self._keeper.shared_digest() + self.state.progress.leases.history
        contribution = replace(contribution, claim=claim, digest=digest)
        return self._worker.submit(self._round.run, contribution)

    def _begin_round(self, local_steps: int) -> None:
        own = self._control.own_steps(local_steps, self.state.progress, self._name)
        self.steps.begin_round(local_steps, own)

    def _arrive(self) -> RoundReport | None:
        """The average is due: wait for it, and keep what was made since the boundary."""
        began = time.perf_counter()
        own = self._own
        flight = own.flight
        assert flight is not None
        with span("wait"):
            self._await(flight.future)
        self._reporter.blocked_seconds += time.perf_counter() - began
        began = time.perf_counter()
        own.flight = None
        outcome = flight.future.result()
        own.tokens += outcome.unsent_tokens
        own.trained = join([*outcome.unsent_samples, *own.trained])
        self._failed = bool(outcome.problem)
        if self._failed and self._agreement.is_first:
            log.warning("the pseudo-gradient stays and joins the next one: %s", outcome.problem)
        if not self._renew_lease(outcome):
            log.warning(
                "%d tokens trained here since the last exchange are left out: %s",
                own.tokens,
                "they came from a state that had diverged"
                if outcome.diverged
                else "their samples are not on lease to this cluster any more",
            )
            own.tokens, own.trained = 0, []
            self._weights.store(self._base())
        elif not (outcome.committed or outcome.healed):
            self._rebase(flight.start, flight.end)
        else:
            base = self._base()
            if outcome.unsent is not None:
                base = {name: base[name] - value for name, value in outcome.unsent.items()}
            self._rebase(flight.start, base)
        if outcome.healed:
            self.steps.catch_up(self.state.progress.steps)
            own.delays.load_state_dict(self.state.progress.delays)
        if not outcome.committed:
            return None
        own.share = outcome.share or own.share
        own.last_exchange_seconds = outcome.exchange_seconds
        own.delays.observe(outcome.slowest_exchange, outcome.fastest_step)
        self.state.progress.delays = own.delays.state_dict()
        self._reporter.blocked_seconds += time.perf_counter() - began
        residual = self.averager.residual_square()
        report = self._reporter.report(flight, outcome, residual, self.state.progress)
        own.measured_rank = self._control.rank_rule.summary(self._reporter.measured)
        if self._on_commit is not None:
            self._on_commit(report)
        return report

    def _lease(self, outcome: Outcome) -> Ranges | None:
        """What this cluster may train; None when no more is known than before."""
        held = self.state.progress.leases.held.get(self._name, outcome.claim)
        return [] if held is None and outcome.healed else held

    def _renew_lease(self, outcome: Outcome) -> bool:
        """After an exchange, whether what is not in theta yet may still get there: whether its
        samples are this cluster's."""
        own, lease = self._own, self._lease(outcome)
        if lease is None:
            return True
        kept = contains(lease, own.trained) and not outcome.diverged
        own.todo = without(lease, own.trained) if kept else lease
        return kept

    def _pause(self) -> None:
        """Between two meetings that bring nothing. Raises Interrupted (on all ranks)."""
        if self._agreement.maximum([float(self._stop_wanted())])[0]:
            raise Interrupted
        time.sleep(_PAUSE_SECONDS)

    def _await(self, future: "Future[Outcome]") -> None:
        """Return when the exchange is over on all ranks. Raises Interrupted (on all of them)."""
        while True:
            wait([future], timeout=_STOP_LOOK_SECONDS)
            running, stop = self._agreement.maximum(
                [float(not future.done()), float(self._stop_wanted())]
            )
            if not running:
                return
            if stop:
                raise Interrupted

    def _rebase(self, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
        with span("outer step"):
            rebase(self._weights, old, new, moved=self.step_in_round > 0)

    def _base(self) -> dict[str, torch.Tensor]:
        """r: what a cluster trains on when nothing is in the air; own to it, never committed.

        theta, or theta - e: what its codec left out of its updates stays with the cluster until
        the others get it, instead of being taken back from it.
        """
        if self._settings.own_residual == "none":
            return self.theta
        return {name: self.averager.without_residual(name, v) for name, v in self.theta.items()}
