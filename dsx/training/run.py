"""One cluster's run: inner steps, the outer engine around them, evaluations, checkpoints."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.cluster.agreement import ClusterAgreement
from dsx.cluster.engine import ClusterEngine
from dsx.cluster.schedule import learning_rate
from dsx.data.batches import BatchStream, heldout_batches
from dsx.data.order import SampleOrder
from dsx.exchange.secret import RunSecret
from dsx.models.pretrained import load_pretrained
from dsx.models.stage import Stage
from dsx.outer.engine import Interrupted, OuterEngine
from dsx.outer.report import RoundReport
from dsx.settings import Settings
from dsx.spans import record, span, take
from dsx.tracking.ledger import Ledger
from dsx.tracking.phases import announce
from dsx.tracking.tracker import Tracker
from dsx.training.meeting import Meeting, meet
from dsx.training.preflight import Preflight, run_identity
from dsx.training.reporting import Reporter, codec_label
from dsx.training.saving import RunSaver
from dsx.training.stopping import StopSignals

log = logging.getLogger(__name__)

_FLIGHT_SECONDS = 3.0
"""How long a run that was asked to end waits for an exchange in the air: what is saved then fits
what the other clusters save. Less than the coordinator waits (5 s) before it lets a cluster whose
peer has ended finish the exchange alone."""


@dataclass(frozen=True)
class Launch:
    """What the command line says about this launch."""

    cluster: str
    coordinator: str | None
    bind_host: str | None
    resume: str
    secret: RunSecret | None = None


class ClusterRun:
    """This rank's part of the run. All methods are collective over the cluster."""

    def __init__(self, settings: Settings, launch: Launch, ready: Preflight) -> None:
        self.step = 0
        self._evaluated_at = 0
        self._evaluated_round: int | None = None
        self._settings = settings
        self._dsx = settings.dsx
        self._ready = ready
        self._launch = launch
        self.engine = ClusterEngine(settings, self._build_stage, tied=ready.plan.tied)
        self._stops = StopSignals(self.engine.agreement)
        self.saver = RunSaver(
            settings,
            ready,
            self.engine,
            launch.cluster,
            launch.resume,
            with_clusters=launch.coordinator is not None,
        )
        tracker = (
            Tracker.open(self._dsx.run_dir, launch.cluster, self._dsx.name, self._dsx.tracking)
            if self.engine.rank == 0
            else Tracker([])
        )
        self._report = Reporter(
            tracker,
            Ledger(self._dsx.run_dir if self.engine.rank == 0 else None, launch.cluster),
            launch.cluster,
            codec=codec_label(self._dsx.outer.compression),
        )
        self._heldout = heldout_batches(
            ready.data.heldout,
            settings.train_micro_batch_size_per_gpu,
            self._dsx.training.eval_batches,
        )
        self.outer: OuterEngine | None = None
        self._meeting: Meeting | None = None
        blocks = ready.data.train
        self._batches = BatchStream(
            blocks,
            SampleOrder(len(blocks), self._dsx.seed),
            settings.train_micro_batch_size_per_gpu,
            settings.gradient_accumulation_steps,
            self.engine.replica_index,
            self.engine.replica_count,
        )
        self._has_begun = False
        self._position = self.saver.position
        self.saved = self.saver.found.folder if self.saver.found is not None else None
        """The checkpoint that a run which was asked to end goes on from."""

    @property
    def _round(self) -> int:
        """Rounds committed so far; 0 without other clusters."""
        return self.outer.round if self.outer is not None else 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that this cluster trains on in one inner step."""
        return self._batches.samples * self._dsx.data.seq_len

    def train(self) -> bool:
        """All inner steps that are left, the flush, the last evaluation and checkpoint.

        Returns:
            whether the run is over: False when it was asked to end before; `saved` is then what
            it goes on from.
        """
        found = self.saver.finished_at
        if found is not None:
            log.info(
                "this run has finished: %s is at step %d of %d; raise dsx.training.steps to go on",
                found.folder,
                found.manifest.step,
                self._dsx.training.steps,
            )
            return True
        self._report.run(self._settings, self._ready)
        try:
            self.begin()
            self._train()
        except Interrupted:
            self._stop()
            return False
        return True

    def close(self) -> None:
        """Leave the other clusters, then end this one."""
        self.saver.close()
        if self.outer is not None:
            self.outer.close()
        if self._meeting is not None:
            self._meeting.close()
        self._report.close()
        self.engine.close()

    def abandon(self) -> None:
        """Of `close`, what may be done while an exchange is still in the air."""
        self._report.close()

    def begin(self) -> None:
        """Bring back what was saved, and meet the other clusters."""
        self.outer = self._join_clusters()
        self.saver.restore(self.outer)
        if self.saver.found is not None and self.saver.is_own:
            self.step = self.saver.found.manifest.step
            self._evaluated_at = self.saver.found.manifest.evaluated_at
        if self.outer is not None:
            announce("waiting for the other clusters", self.engine.rank)
            clusters = self.outer.start()
            log.info("training together: %s", ", ".join(clusters))
            record(self._report.wants_phases(self._round))
            if not self.outer.goes_on:
                # A cluster that comes later goes on where the others are.
                self.step = self.outer.steps.step
            self._report.ledger.start(
                self._dsx.data.seq_len,
                self._round,
                self.outer.state.progress.leases,
                self.outer.unsent_samples,
            )
        self._has_begun = True

    def _train(self) -> None:
        if self.outer is not None and self.outer.goes_on:
            self.outer.go_on()
        steps = self._dsx.training.steps
        self.advance_to(steps)
        if self.outer is not None:
            announce("finishing the last exchange", self.engine.rank)
            self.outer.finish()
            self._report.ledger.end()
        # The flush may have changed the shared weights at a step that was evaluated before it.
        if (self._evaluated_at, self._evaluated_round) != (self.step, self._round) or steps == 0:
            self._evaluate()
        if steps > 0:
            announce("saving", self.engine.rank)
            self.save(wait=True)

    def advance_to(self, step: int) -> None:
        """Inner steps up to `step`, and what falls due between them.

        Raises Interrupted when the cluster was asked to end.
        """
        while self.step < step:
            self._inner_step()
            if self._stops.agreed():
                raise Interrupted

    def _stop(self) -> None:
        """Asked to end: save what there is."""
        if not self._has_begun:
            return  # still waiting for the others: nothing has changed since the last checkpoint
        announce("saving", self.engine.rank)
        if self.outer is not None:
            self.outer.wait_for_flight(_FLIGHT_SECONDS)
        self.saved = self.save(wait=True)

    def save(self, *, wait: bool = False) -> Path | None:
        """Write a checkpoint of this moment, between two inner steps; see `RunSaver.save`."""
        with span("save"):
            return self.saver.save(
                self.step, self._evaluated_at, self._position, self.outer, wait=wait
            )

    def _build_stage(self, index: int) -> Stage:
        pipeline = self._dsx.pipeline
        model = self._dsx.model
        pretrained = model.path if model.init == "pretrained" else None
        stage = self._ready.plan.build_stage(
            self._ready.stages[index],
            None if pretrained else self._dsx.seed,
            pipeline.activation_checkpointing,
        )
        if pretrained:
            load_pretrained(stage, pretrained)
        return stage

    def _join_clusters(self) -> OuterEngine | None:
        if self._launch.coordinator is None:
            return None
        self._meeting = meet(
            self._launch.cluster,
            self._launch.coordinator,
            self._launch.bind_host,
            self.engine.rank,
            self.engine.world_size,
            ClusterAgreement(),
            self._dsx.outer.timeout_seconds,
            self._launch.secret,
        )
        return OuterEngine(
            self._dsx.outer,
            self.engine.weights,
            self._meeting.exchange,
            identity=run_identity(self._settings, self._ready),
            step_samples=self._batches.samples,
            seed=self._dsx.seed,
            vocab_size=self._ready.plan.vocab_size,
            agreement=self.engine.agreement,
            on_commit=self._after_commit,
            stop_wanted=lambda: self._stops.wanted,
        )

    def _inner_step(self) -> None:
        samples = self._draw()
        rate = learning_rate(self.step, self._settings)
        self._batches.load(samples)
        with span("inner steps"):
            result = self.engine.train_step(self._batches, rate)
        # The run's steps are those of the fastest cluster: one that makes fewer of its own in a
        # round (`outer.adapt.balanced`) passes several with each.
        self.step = self.outer.steps.next_step if self.outer is not None else self.step + 1
        made = self.outer.steps.made + 1 if self.outer is not None else self.step
        round_ = self._round
        self._report.inner(
            self.step, round_, rate, result, self.tokens_per_step, made * self.tokens_per_step
        )
        if self.outer is None:
            if self._evaluation_is_due():
                self._evaluate()
            if self.saver.is_due(self.step, 0):
                self.save()
            return
        self._report.ledger.step(self.step, [(at, at + 1) for at in samples])
        self.outer.advance(self.tokens_per_step, result.seconds)
        self.outer.settle()

    def _draw(self) -> Sequence[int]:
        """The samples of the next inner step."""
        if self.outer is not None:
            return self.outer.draw()
        start, self._position = self._position, self._position + self._batches.samples
        return range(start, self._position)

    def _after_commit(self, report: RoundReport) -> None:
        self._report.outer(report)
        self._tell_phases(report.round)
        if self._evaluation_is_due():
            self._evaluate()
        if self.saver.is_due(self.step, report.round):
            self.save()

    def _tell_phases(self, round_: int) -> None:
        """What the ranks did in a round that has ended, if that was to be recorded (collective)."""
        spans = take()
        if self._report.wants_phases(round_ - 1):
            self._report.phases(round_, self.engine.agreement.gather(spans))
        record(self._report.wants_phases(round_))

    def _evaluation_is_due(self) -> bool:
        every = self._dsx.training.eval_every
        return every > 0 and self.step // every > self._evaluated_at // every

    def _evaluate(self) -> None:
        """Held-out loss of the shared weights, or of the own ones where nothing is shared."""
        weights = self.engine.weights
        own = None
        if self.outer is not None:
            own = weights.fetch()
            weights.store(self.outer.theta)
        announce("evaluating", self.engine.rank)
        with span("evaluate"):
            loss = self.engine.eval_loss(self._heldout)
        if own is not None:
            weights.store(own)
        round_ = self._round
        self._evaluated_at, self._evaluated_round = self.step, round_
        self._report.evaluation(self.step, round_, loss, shared=self.outer is not None)
