"""What the ranks of a test cluster do; the tests compare what they return with plain torch."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from dsx.cluster.distributed import initialize
from dsx.cluster.engine import ClusterEngine
from dsx.cluster.master_weights import MASTER
from dsx.cluster.schedule import learning_rate
from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.settings import Settings, parse_settings
from tests.cluster.reference import made_up, sequences, split


def open_engine(raw: dict[str, Any]) -> tuple[ClusterEngine, Settings]:
    settings = parse_settings(raw)
    plan = ModelPlan(load_config(settings.dsx.model))
    ranges = plan.partition(settings.dsx.pipeline.stages)
    engine = ClusterEngine(
        settings,
        lambda index: plan.build_stage(
            ranges[index], settings.dsx.seed, settings.dsx.pipeline.activation_checkpointing
        ),
        tied=plan.tied,
    )
    return engine, settings


def batches(engine: ClusterEngine, settings: Settings) -> Iterator[Any]:
    """This replica's micro-batches: row b of micro-batch m is sequence m D mb + d mb + b."""
    rows = settings.train_micro_batch_size_per_gpu
    for step in itertools.count():
        whole = sequences(step).split(rows)
        for micro in range(settings.gradient_accumulation_steps):
            yield split(whole[micro * engine.replica_count + engine.replica_index])


def module_weights(engine: ClusterEngine) -> dict[str, torch.Tensor]:
    named = dict(engine.stage.named_parameters())
    return {hf: named[own].detach().clone() for own, hf in engine.stage.hf_names.items()}


def own_master_parts(engine: ClusterEngine) -> dict[str, torch.Tensor]:
    """The raw contents of this rank's flat fp32 partition, whoever owns what."""
    return {
        hf: dict(engine.stage.named_parameters())[own]._hp_mapping.hp_fragment.detach().clone()
        for own, hf in engine.stage.hf_names.items()
        if dict(engine.stage.named_parameters())[own]._hp_mapping is not None
    }


def train_and_write(raw: dict[str, Any], bucket_elements: int) -> dict[str, Any]:
    """Trains, writes weights and moments, trains on; everything that was seen on the way."""
    engine, settings = open_engine(raw)
    engine.weights._bucket_elements = bucket_elements
    stream, step = batches(engine, settings), itertools.count()
    seen: dict[str, Any] = {"rank": engine.rank, "stage": engine.stage_index}
    seen["dtype"] = str(next(engine.stage.parameters()).dtype)

    def train(steps: int, lr: float | None = None) -> list[tuple[float, float]]:
        results = []
        for _ in range(steps):
            rate = learning_rate(next(step), settings) if lr is None else lr
            result = engine.train_step(stream, rate)
            assert {group["lr"] for group in engine.optimizer.param_groups} == {rate}
            results.append((result.loss, result.grad_norm))
        return results

    def snapshot(key: str) -> None:
        seen[key] = engine.weights.fetch()
        seen[f"{key}-module"] = module_weights(engine)
        seen[f"{key}-parts"] = own_master_parts(engine)

    rows = settings.train_micro_batch_size_per_gpu
    heldout = [split(sequences(500 + i)[:rows]) for i in range(5)]
    snapshot("initial")
    seen["eval-initial"] = engine.eval_loss(heldout)
    kinds = engine.weights.moment_kinds()
    seen["train-first"] = train(1)
    seen["first-moment"] = engine.weights.fetch(kinds[0])
    seen["train-first"] += train(4)
    seen["eval-trained"] = engine.eval_loss(heldout)
    snapshot("trained")
    seen["train-second"] = train(5)
    snapshot("ten-steps")
    seen["moments"] = {kind: engine.weights.fetch(kind) for kind in kinds}
    seen["optimizer-steps"] = engine.weights.optimizer_steps

    shapes = engine.weights.shapes()
    engine.weights.store(made_up(shapes, salt=1))
    snapshot("written")
    seen["eval-written"] = engine.eval_loss(heldout)
    for number, kind in enumerate(kinds):
        values = {n: v.abs() for n, v in made_up(shapes, salt=2 + number, scale=1e-3).items()}
        engine.weights.store(values, kind)
    engine.weights.optimizer_steps = 7
    seen["moments-written"] = {kind: engine.weights.fetch(kind) for kind in kinds}
    seen["train-without-learning"] = train(1, lr=0.0)
    snapshot("unlearned")
    seen["train-last"] = train(4)
    snapshot("last")
    assert MASTER not in kinds
    engine.close()
    return seen


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def decide_and_refuse(raw: dict[str, Any]) -> dict[str, Any]:
    """Agreement, evaluation of few batches, and calls that can't be met."""
    port = os.environ.pop("MASTER_PORT")
    seen = {"no-port": _error(initialize)}
    os.environ["MASTER_PORT"] = port
    engine, settings = open_engine(raw)
    rank, agreement, weights = engine.rank, engine.agreement, engine.weights
    sockets = psutil.Process().net_connections(kind="tcp")
    seen["listening"] = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    seen["maximum"] = agreement.maximum([rank, -rank, 0.5])
    seen["total"] = agreement.total([2.0**52, rank])
    seen["broadcast"] = agreement.broadcast({"from": rank})
    seen["gather"] = agreement.gather(f"rank {rank}")
    agreement.barrier()

    rows = settings.train_micro_batch_size_per_gpu
    one = split(sequences(1)[:rows])
    seen["eval-none"] = _error(lambda: engine.eval_loss([]))
    short = tuple(part[:, :-1] for part in one)
    seen["eval-short"] = _error(lambda: engine.eval_loss([one, short]))
    seen["eval-one"] = engine.eval_loss([one])
    seen["eval-same-three"] = engine.eval_loss([one] * 3)

    masters = weights.fetch()
    seen["owned"] = {name: tensor.numel() for name, tensor in masters.items()}
    others = list(masters)[1:]
    seen["store-fewer"] = _error(lambda: weights.store({n: masters[n] for n in others}))
    seen["kind"] = _error(lambda: weights.fetch("momentum_buffer"))
    seen["steps-before"] = weights.optimizer_steps
    seen["moments-before"] = max(float(v.abs().max()) for v in weights.fetch("exp_avg").values())

    poison = {n: torch.full_like(v, torch.nan) if "norm" in n else v for n, v in masters.items()}
    weights.store(poison)
    result = engine.train_step(batches(engine, settings), 1e-2)
    seen["poisoned"] = (result.loss, result.grad_norm)
    kept = weights.fetch()
    seen["poison-spread"] = [
        n for n, v in masters.items() if "norm" not in n and (v != kept[n]).any()
    ]
    weights.store(masters)
    result = engine.train_step(batches(engine, settings), 1e-2)
    seen["cured"] = (result.loss, result.grad_norm)

    three = dict(raw, dsx={**raw["dsx"], "pipeline": {"stages": 3}})
    seen["three-stages"] = _error(lambda: open_engine(three))
    engine.close()
    return seen


def store_wrong(raw: dict[str, Any]) -> list[str]:
    """Stores that a single rank refuses when it comes to the tensor."""
    engine, _ = open_engine(raw)
    masters = engine.weights.fetch()
    first = next(iter(masters))
    shape = {**masters, first: masters[first][:1]}
    dtype = {**masters, first: masters[first].bfloat16()}
    return [_error(lambda wrong=wrong: engine.weights.store(wrong)) for wrong in (shape, dtype)]
