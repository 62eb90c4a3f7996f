"""One cluster's run: inner steps, the outer engine around them, evaluations, checkpoints."""

import logging
from dataclasses import dataclass

from dsx.cluster.engine import ClusterEngine
from dsx.cluster.schedule import learning_rate
from dsx.data.batches import BatchStream, heldout_batches
from dsx.data.order import SampleOrder
from dsx.models.pretrained import load_pretrained
from dsx.models.stage import Stage
from dsx.outer.engine import OuterEngine, RoundReport
from dsx.settings import Settings
from dsx.tracking.phases import announce
from dsx.tracking.tracker import Tracker
from dsx.training.meeting import meet
from dsx.training.preflight import Preflight, run_identity
from dsx.training.reporting import Reporter, codec_label

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What the command line says about this launch."""

    cluster: str
    coordinator: str | None
    bind_host: str | None
    resume: str


class ClusterRun:
    """This rank's part of the run. All methods are collective over the cluster."""

    def __init__(self, settings: Settings, launch: Launch, ready: Preflight) -> None:
        self.step = 0
        self._settings = settings
        self._dsx = settings.dsx
        self._ready = ready
        self._launch = launch
        self.engine = ClusterEngine(settings, self._build_stage, tied=ready.plan.tied)
        tracker = (
            Tracker.open(self._dsx.run_dir, launch.cluster, self._dsx.name, self._dsx.tracking)
            if self.engine.rank == 0
            else Tracker([])
        )
        self._report = Reporter(
            tracker, launch.cluster, codec=codec_label(self._dsx.outer.compression)
        )
        self._heldout = heldout_batches(
            ready.data.heldout,
            settings.train_micro_batch_size_per_gpu,
            self._dsx.training.eval_batches,
        )
        self._evaluated_at = 0
        self.outer, self._store = self._join_clusters()
        place, places = self._place()
        self._batches = BatchStream(
            ready.data.train,
            SampleOrder(len(ready.data.train), self._dsx.seed),
            settings.train_micro_batch_size_per_gpu,
            settings.gradient_accumulation_steps,
            place,
            places,
            self.engine.replica_index,
            self.engine.replica_count,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that this cluster trains on in one inner step."""
        return (
            self._settings.train_micro_batch_size_per_gpu
            * self._settings.gradient_accumulation_steps
            * self.engine.replica_count
            * self._dsx.data.seq_len
        )

    def train(self) -> None:
        """All inner steps that are left, the flush, and the last evaluation."""
        self._report.run(self._settings, self._ready)
        steps = self._dsx.training.steps
        while self.step < steps:
            self._inner_step()
        if self.outer is not None:
            announce("finishing the last exchange", self.engine.rank)
            self.outer.finish()
        if self._evaluated_at < self.step or steps == 0:
            self._evaluate()

    def close(self) -> None:
        """Leave the other clusters, then end this one."""
        if self.outer is not None:
            self.outer.close()
        self._report.close()
        self.engine.close()

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

    def _join_clusters(self):  # type: ignore[no-untyped-def]
        if self._launch.coordinator is None:
            return None, None
        exchange, store = meet(
            self._launch.cluster,
            self._launch.coordinator,
            self._launch.bind_host,
            self.engine.rank,
            self.engine.world_size,
            self.engine.agreement,
            self._dsx.outer.timeout_seconds,
        )
        outer = OuterEngine(
            self._dsx.outer,
            self.engine.weights,
            exchange,
            identity=run_identity(self._settings, self._ready),
            seed=self._dsx.seed,
            vocab_size=self._ready.plan.vocab_size,
            agreement=self.engine.agreement,
            on_commit=self._after_commit,
        )
        return outer, store

    def _place(self) -> tuple[int, int]:
        """This cluster's place among those that read the corpus together."""
        if self.outer is None:
            return 0, 1
        announce("waiting for the other clusters", self.engine.rank)
        clusters = self.outer.start()
        # A cluster that comes later goes on where the others are.
        self.step = self.outer.round * self._dsx.outer.local_steps
        log.info("training together: %s", ", ".join(clusters))
        return clusters.index(self._launch.cluster), len(clusters)

    def _inner_step(self) -> None:
        rate = learning_rate(self.step, self._settings)
        self._batches.seek(self.step)
        result = self.engine.train_step(self._batches, rate)
        self.step += 1
        round_ = self.outer.round if self.outer is not None else 0
        self._report.inner(self.step, round_, rate, result, self.tokens_per_step)
        if self.outer is None:
            if self._evaluation_is_due():
                self._evaluate()
            return
        self.outer.advance(self.tokens_per_step, result.seconds)
        self.outer.settle()

    def _after_commit(self, report: RoundReport) -> None:
        self._report.outer(report)
        if self._evaluation_is_due():
            self._evaluate()

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
        loss = self.engine.eval_loss(self._heldout)
        if own is not None:
            weights.store(own)
        self._evaluated_at = self.step
        round_ = self.outer.round if self.outer is not None else 0
        self._report.evaluation(self.step, round_, loss, shared=self.outer is not None)
