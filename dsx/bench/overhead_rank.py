"""One rank of `dsx bench overhead`: both sides in one process, taking turns at every step."""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dsx.bench.bare import BareEngine
from dsx.cluster.optimizer import build_optimizer
from dsx.data.batches import BatchStream
from dsx.data.order import SampleOrder
from dsx.settings import parse_settings
from dsx.training.preflight import preflight
from dsx.training.run import ClusterRun, Launch

_WARM_UP = 3
"""Steps of each side before the first block."""


def measure(request_file: Path) -> None:
    """Do what `dsx.bench.overhead` asks for in a file; rank 0 writes the answer."""
    request = json.loads(request_file.read_text())
    blocks, steps = request["blocks"], request["steps"]
    raw = request["settings"]
    dsx = raw["dsx"]
    dsx["run_dir"] = request["run_dir"]
    dsx["tracking"] = {**dsx["tracking"], "wandb": False}
    dsx["checkpoint"] = {**dsx["checkpoint"], "every_rounds": 0}
    needed = max(dsx["training"]["steps"], _WARM_UP + blocks * steps)
    dsx["training"] = {**dsx["training"], "steps": needed, "eval_every": 0}
    settings = parse_settings(raw)

    ready = preflight(settings, dsx["pipeline"]["stages"], check_split=False)
    run = ClusterRun(settings, Launch("bench", None, None, "never"), ready)
    engine = run.engine
    initial = engine.weights.fetch()
    config = settings.deepspeed_config()
    optimizer = config.pop("optimizer")
    bare = BareEngine(
        ready.plan.config,
        config,
        [stage.stop - stage.start for stage in ready.stages],
        initial,
        lambda parameters: build_optimizer(optimizer, parameters, parameters[0].device),
    )
    run.begin()
    batches = BatchStream(
        ready.data.train,
        SampleOrder(len(ready.data.train), settings.dsx.seed),
        settings.train_micro_batch_size_per_gpu,
        settings.gradient_accumulation_steps,
        engine.replica_index,
        engine.replica_count,
    )

    positions = itertools.count(0, batches.samples)

    def bare_step() -> torch.Tensor:
        start = next(positions)
        batches.load(range(start, start + batches.samples))
        return bare.train_step(batches)

    def dsx_step() -> None:
        run.advance_to(run.step + 1)

    def seconds(step: Callable[[], object]) -> float:
        engine.agreement.barrier()
        started = time.perf_counter()
        step()
        engine.agreement.barrier()
        return time.perf_counter() - started

    first_loss = float(bare_step())
    dsx_step()
    for _ in range(_WARM_UP - 1):
        bare_step()
        dsx_step()
    sides: list[tuple[str, Callable[[], object]]] = [("bare", bare_step), ("dsx", dsx_step)]
    times: dict[str, list[float]] = {"bare": [], "dsx": []}
    for _ in range(blocks):
        own: dict[str, list[float]] = {"bare": [], "dsx": []}
        for _ in range(steps):
            for name, step in sides:
                own[name].append(seconds(step))
            sides.reverse()
        for name, samples in own.items():
            times[name].append(statistics.median(samples))
    run.close()
    if engine.rank == 0:
        ours = _first_loss(Path(request["run_dir"]))
        answer = {**times, "loss_difference": abs(ours - first_loss) / first_loss}
        Path(request["answer"]).write_text(json.dumps(answer))


def _first_loss(run_dir: Path) -> float:
    """Of the first inner step that the cluster has logged."""
    (metrics,) = run_dir.glob("metrics-*.jsonl")
    lines = map(json.loads, metrics.read_text().splitlines())
    return float(next(line["loss"] for line in lines if line["kind"] == "inner"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    measure(parser.parse_args().request)


if __name__ == "__main__":
    main()
