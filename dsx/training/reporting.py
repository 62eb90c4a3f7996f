"""Turns what happens in a run into the lines that it leaves behind."""

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version

from dsx.cluster.engine import StepResult
from dsx.outer.report import RoundReport
from dsx.settings import Settings
from dsx.settings.codec_block import CompressionSettings, LowRankCodec, TopKCodec
from dsx.spans import Span
from dsx.tracking.events import EvalEvent, InnerEvent, OuterEvent, PhasesEvent, RunEvent
from dsx.tracking.ledger import Ledger
from dsx.tracking.tracker import Tracker
from dsx.training.preflight import Preflight

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 10.0
"""At least this long passes between two lines of progress."""

_PHASES_ROUNDS, _PHASES_EVERY = 3, 100
"""Of every so many rounds, the phases of so many are told."""

_PACKAGES = ("dsx", "torch", "deepspeed", "transformers", "torchft")


def codec_label(compression: CompressionSettings) -> str:
    """The codec of matrices in a word or three: `int4`, `topk 0.03 int2`, `lowrank 64 int4`."""
    codec = compression.matrices
    if isinstance(codec, TopKCodec):
        return f"topk {codec.fraction:g} {codec.values.type}"
    if isinstance(codec, LowRankCodec):
        return f"lowrank {codec.rank} {codec.factors.type}"
    return codec.type


class Reporter:
    """The lines of one cluster. Only its rank 0 has a tracker with sinks, and logs what is INFO."""

    def __init__(self, tracker: Tracker, ledger: Ledger, cluster: str, codec: str) -> None:
        self.ledger = ledger
        self._tracker = tracker
        self._cluster = cluster
        self._codec = codec
        self._steps = 0
        self._told = -_PROGRESS_SECONDS
        self._participants: frozenset[str] | None = None

    def run(self, settings: Settings, ready: Preflight) -> None:
        self._steps = settings.dsx.training.steps
        stages = [stage.stop - stage.start for stage in ready.stages]
        self._tracker.log(
            RunEvent(
                cluster=self._cluster,
                settings=settings.model_dump(mode="json"),
                versions={name: version(name) for name in _PACKAGES},
                model_size=ready.model_size,
                layout={
                    "stages": len(stages),
                    "replicas": ready.replicas,
                    "layers_per_stage": stages,
                    "data_folder": str(ready.data.folder),
                },
                heldout_bytes_per_token=ready.data.heldout_bytes_per_token,
            )
        )

    def inner(
        self, step: int, round_: int, lr: float, result: StepResult, batch: int, tokens: int
    ) -> None:
        now = time.monotonic()
        if now - self._told >= _PROGRESS_SECONDS or step >= self._steps:
            self._told = now
            log.info(
                "step %d of %d, round %d: loss %.4f, %s tokens/s",
                *(step, self._steps, round_, result.loss, f"{batch / result.seconds:,.0f}"),
            )
        self._tracker.log(
            InnerEvent(
                cluster=self._cluster,
                step=step,
                round=round_,
                loss=result.loss,
                lr=lr,
                grad_norm=result.grad_norm,
                tokens=tokens,
                tokens_per_second=batch / result.seconds,
            )
        )

    def outer(self, report: RoundReport) -> None:
        self._tell_changes(report)
        self.ledger.round(report.round, report.shared_digest, report.leases)
        self._tracker.log(
            OuterEvent(
                cluster=self._cluster,
                round=report.round,
                participants=list(report.participants),
                bytes_sent=report.bytes_sent,
                bytes_received=report.bytes_received,
                exchange_seconds=report.exchange_seconds,
                blocked_seconds=report.blocked_seconds,
                local_steps=report.local_steps,
                rank=report.rank,
                codec=self._codec,
                pseudo_gradient_norm=report.pseudo_gradient_norm,
                shared_digest=report.shared_digest,
                tokens_total=report.tokens_total,
                delay=report.delay,
                relative_error=report.relative_error,
                residual_ratio=report.residual_ratio,
                cosine=report.cosine,
            )
        )

    def wants_phases(self, round_: int) -> bool:
        """Whether the timeline of the round after `round_` is to be told: of a few in a row, so
        that an exchange is seen beside the steps that hide it, and seldom."""
        return round_ % _PHASES_EVERY < _PHASES_ROUNDS

    def phases(self, round_: int, ranks: Sequence[Sequence[Span]]) -> None:
        """What each rank of the cluster did in a round."""
        for rank, spans in enumerate(ranks):
            told = [(name, round(start, 4), round(seconds, 4)) for name, start, seconds in spans]
            self._tracker.log(
                PhasesEvent(cluster=self._cluster, round=round_, rank=rank, spans=told)
            )

    def evaluation(self, step: int, round_: int, loss: float, shared: bool) -> None:
        weights = "shared weights" if shared else "weights"
        log.info("held-out loss of the %s: %.4f (step %d, round %d)", weights, loss, step, round_)
        self._tracker.log(
            EvalEvent(
                cluster=self._cluster,
                step=step,
                round=round_,
                loss=loss,
                weights="shared" if shared else "local",
            )
        )

    def _tell_changes(self, report: RoundReport) -> None:
        here = frozenset(report.participants)
        before = here if self._participants is None else self._participants
        self._participants = here
        for change, names in (("without", before - here), ("with", here - before)):
            if names:
                log.info(
                    "round %d was made %s %s; clusters now: %s",
                    *(report.round, change, ", ".join(sorted(names)), ", ".join(sorted(here))),
                )

    def close(self) -> None:
        self.ledger.close()
        self._tracker.close()
