"""Makes one simulated run: several clusters in lockstep in one thread, or a baseline."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dsx.data.batches import BatchStream, MicroBatch, heldout_batches
from dsx.data.order import SampleOrder
from dsx.data.prepared import PreparedData
from dsx.exchange.in_process import InProcessHub
from dsx.outer.engine import OuterEngine
from dsx.settings.settings import Settings
from dsx.simulation.inner import InnerTraining, build_model, evaluate
from dsx.simulation.result import Point, RunResult
from dsx.simulation.spec import RunSpec
from dsx.simulation.weights import StageWeights

FP32_BYTES = 4
_LANDING_SECONDS = 600.0


def all_reduce_bytes(parameters: int, clusters: int) -> float:
    """Bytes that each of `clusters` sends in one fp32 ring all-reduce of all gradients."""
    return 2 * (clusters - 1) / clusters * FP32_BYTES * parameters


class _Trial:
    """What every kind of run has: data, evaluation, the curve."""

    def __init__(self, spec: RunSpec, data: PreparedData, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.settings: Settings = spec.settings()
        self.steps = self.settings.dsx.training.steps
        self.curve: list[Point] = []
        self.durations: list[float] = []
        self._data = data
        self._began = time.perf_counter()
        training = self.settings.dsx.training
        self._heldout = heldout_batches(
            data.heldout, self.settings.train_micro_batch_size_per_gpu, training.eval_batches
        )

    @property
    def cluster_tokens(self) -> int:
        """Tokens that a cluster trains on in one inner step."""
        return (
            self.settings.train_micro_batch_size_per_gpu
            * self.settings.gradient_accumulation_steps
            * self.settings.dsx.data.seq_len
        )

    def stream(self) -> BatchStream:
        blocks = self._data.train
        return BatchStream(
            blocks,
            SampleOrder(len(blocks), self.settings.dsx.seed),
            self.settings.train_micro_batch_size_per_gpu,
            self.settings.gradient_accumulation_steps,
        )

    def batches(self, stream: BatchStream, positions: Sequence[int]) -> list[MicroBatch]:
        """One inner step's."""
        stream.load(positions)
        return list(stream)

    def train(self, training: InnerTraining, batches: Sequence[MicroBatch]) -> None:
        began = time.perf_counter()
        training.train_step(batches)
        self.durations.append(time.perf_counter() - began)

    def due(self, step: int) -> bool:
        """Whether to evaluate after `step` inner steps (the end is evaluated after the flush)."""
        every = self.settings.dsx.training.eval_every
        return every > 0 and step % every == 0 and step < self.steps

    def note(self, step: int, sent: float, model: Any) -> None:
        learners = 1 if self.spec.kind == "single" else self.spec.clusters
        loss = evaluate(model, self._heldout)
        tokens = step * self.cluster_tokens * learners
        self.curve.append(Point(step=step, tokens=tokens, bytes=sent, loss=loss))

    def result(self, parameters: int, bytes_sent: float, rounds: int) -> RunResult:
        full = all_reduce_bytes(parameters, self.spec.clusters) * self.steps
        outer = self.settings.dsx.outer
        clustered = self.spec.kind == "clusters"
        delay = outer.local_steps if isinstance(outer.delay, str) else outer.delay
        return RunResult(
            kind=self.spec.kind,
            seed=self.settings.dsx.seed,
            clusters=self.spec.clusters,
            parameters=parameters,
            steps=self.steps,
            tokens=self.curve[-1].tokens,
            loss=self.curve[-1].loss,
            bytes_per_step=bytes_sent / max(1, self.steps),
            fewer_bytes=full / bytes_sent if bytes_sent else None,
            rounds=rounds,
            bytes_per_round=bytes_sent / rounds if rounds else 0.0,
            local_steps=outer.local_steps if clustered else 1,
            delay=delay if clustered else 0,
            step_seconds=statistics.median(self.durations) if self.durations else 0.0,
            wall_seconds=time.perf_counter() - self._began,
            curve=self.curve,
        )


def run_baseline(trial: _Trial) -> RunResult:
    """`allreduce`: one model, every step on the batches of all clusters; `single`: on cluster 0's.

    Communication of the former is counted, not made: fp32 all-reduce between equal models is exact.
    """
    spec = trial.spec
    training = InnerTraining(trial.settings, spec.inner, trial.device)
    parameters = sum(p.numel() for p in training.model.parameters())
    joined = spec.kind == "allreduce"
    stream = trial.stream()
    size, learners = stream.samples, spec.clusters if joined else 1
    per_step = all_reduce_bytes(parameters, spec.clusters) if joined else 0.0
    for step in range(1, trial.steps + 1):
        first = (step - 1) * learners * size
        parts = [range(at, at + size) for at in range(first, first + learners * size, size)]
        trial.train(training, [batch for part in parts for batch in trial.batches(stream, part)])
        if trial.due(step):
            trial.note(step, step * per_step, training.model)
    trial.note(trial.steps, trial.steps * per_step, training.model)
    return trial.result(parameters, trial.steps * per_step, trial.steps if joined else 0)


class _Cluster:
    def __init__(self, trial: _Trial, index: int, hub: InProcessHub) -> None:
        self.training = InnerTraining(trial.settings, trial.spec.inner, trial.device)
        self.stream = trial.stream()
        self.exchange = hub.exchange(f"c{index}")
        weights = StageWeights(self.training.model)
        block = trial.settings.dsx
        vocab_size = self.training.model.config.vocab_size
        self.engine = OuterEngine(
            block.outer,
            weights,
            self.exchange,
            seed=block.seed,
            vocab_size=vocab_size,
            step_samples=self.stream.samples,
        )


def run_clusters(trial: _Trial) -> RunResult:
    """All clusters, one inner step each in turn, with an outer engine each."""
    count = trial.spec.clusters
    # Only the registered members of a hub wait for each other: all must be there first.
    hub = InProcessHub([f"c{index}" for index in range(count)])
    clusters = [_Cluster(trial, index, hub) for index in range(count)]
    shared = build_model(trial.settings).to(trial.device)
    weights = StageWeights(shared)
    parameters = sum(shape.numel() for shape in weights.shapes().values())

    def sent() -> float:
        return sum(cluster.exchange.traffic.sent for cluster in clusters) / count

    def note(step: int) -> None:
        # An exchange in the air changes theta and the bytes at any moment: let it land.
        for cluster in clusters:
            cluster.engine.wait_for_flight(_LANDING_SECONDS)
        weights.store(clusters[0].engine.theta)
        trial.note(step, sent(), shared)

    try:
        _together(clusters, lambda cluster: cluster.engine.start())
        at_start = sent()
        for step in range(1, trial.steps + 1):
            for cluster in clusters:
                trial.train(cluster.training, trial.batches(cluster.stream, cluster.engine.draw()))
                cluster.engine.advance(tokens=trial.cluster_tokens, seconds=1.0)
            for cluster in clusters:
                cluster.engine.settle()
            if trial.due(step):
                note(step)
        _together(clusters, lambda cluster: cluster.engine.finish())
        note(trial.steps)
        rounds = clusters[0].engine.round
        return trial.result(parameters, sent() - at_start, rounds)
    finally:
        for cluster in clusters:
            cluster.engine.close()


def _together(clusters: Sequence[_Cluster], what: Callable[[_Cluster], object]) -> None:
    with ThreadPoolExecutor(len(clusters)) as pool:
        list(pool.map(what, clusters))


def make_run(spec: RunSpec, data: PreparedData, device: torch.device) -> RunResult:
    """The result of `spec`, a pure function of it and of `data` but for the measured seconds.

    Raises:
        DsxError: settings, model or data don't fit.
    """
    trial = _Trial(spec, data, device)
    return run_clusters(trial) if spec.kind == "clusters" else run_baseline(trial)
