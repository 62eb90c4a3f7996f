"""The outer engine on one real layer of a model that no machine here could hold, tensor by tensor.

A stage is laid out on the meta device and its parameters are compared with those of the unsplit
model. Then one of its layers gets memory, one tensor at a time, and goes through what a round does:
the own update is encoded, averaged with another cluster's message, and the fp32 shared weights take
an outer step. These are the calls that `dsx.outer.averaging` makes.
"""

import resource
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.compression.table import CodecTable
from dsx.errors import ModelError, SettingsError
from dsx.models.partition import StageRange
from dsx.models.plan import ModelPlan
from dsx.models.skeleton import build_lm
from dsx.outer.optimizer import OuterOptimizer
from dsx.planning.outer_choice import codec_seconds
from dsx.settings.settings import Settings

_CLUSTERS = 2
_COPIES = 4 + _CLUSTERS
"""fp32 copies of one tensor that are there at once: in the outer step shared weight, momentum, mean
and an intermediate value, and the new residual of each cluster that is played here. (What a rank
keeps of its other tensors is not part of this.)"""


@dataclass(frozen=True)
class DryRun:
    """What was built, what it took, and what the plan says."""

    stage: StageRange
    stage_parameters: int
    layer_parameters: int
    tensors: int
    encode_seconds: float
    """Of the layer, one cluster's message."""
    decode_seconds: float
    """Of both clusters' messages, and their mean."""
    outer_step_seconds: float
    planned_seconds: float
    """For encoding and decoding, by the plan's rate."""
    message_bytes: int
    """One cluster's, of the layer."""
    planned_bytes: int
    peak_bytes: int
    """By which the process has grown."""
    planned_peak_bytes: int


def dry_run(settings: Settings, plan: ModelPlan, stages: int, stage: int) -> DryRun:
    """Check stage `stage` of `stages`, and run the outer engine on its first layer.

    Raises:
        SettingsError: there is no such stage.
        ModelError: its parameters are not the unsplit model's.
    """
    if not 0 <= stage < stages:
        raise SettingsError(f"--stage {stage}: a layout of {stages} stages has 0 to {stages - 1}")
    chosen = plan.partition(stages)[stage]
    shapes = plan.stage_shapes(chosen)
    check_stage(plan, chosen)
    layer = plan.stage_shapes(StageRange(1, 3, chosen.start, chosen.start + 1))
    before = _peak()
    compression = settings.dsx.outer.compression
    tables = [CodecTable(compression, settings.dsx.seed, plan.vocab_size) for _ in range(_CLUSTERS)]
    outer = settings.dsx.outer
    encoding = decoding = stepping = 0.0
    sent = planned = 0
    for index, (name, shape) in enumerate(layer.items()):
        messages = []
        for cluster, table in enumerate(tables):
            update = _delta(shape, 2 * index + cluster)
            began = time.perf_counter()
            messages.append(table.encode_with_residual(name, update, 0, overwrite=True)[0])
            encoding += (time.perf_counter() - began) / _CLUSTERS
            del update
        began = time.perf_counter()
        mean = _mean(tables, messages, name, shape)
        decoding += time.perf_counter() - began
        optimizer = OuterOptimizer({name: torch.zeros(shape)}, outer.lr, outer.momentum)
        began = time.perf_counter()
        optimizer.step({name: mean})
        stepping += time.perf_counter() - began
        sent += messages[0].numel()
        planned += tables[0].most_bytes(name, shape, shape)
        for table in tables:
            table.commit()
    parameters = sum(shape.numel() for shape in layer.values())
    return DryRun(
        stage=chosen,
        stage_parameters=sum(shape.numel() for shape in shapes.values()),
        layer_parameters=parameters,
        tensors=len(layer),
        encode_seconds=encoding,
        decode_seconds=decoding,
        outer_step_seconds=stepping,
        planned_seconds=codec_seconds(outer, parameters, _CLUSTERS),
        message_bytes=sent,
        planned_bytes=planned,
        peak_bytes=_peak() - before,
        planned_peak_bytes=4 * _COPIES * max(shape.numel() for shape in layer.values()),
    )


def check_stage(plan: ModelPlan, stage: StageRange) -> None:
    """Compare names and shapes with those of the library's own unsplit model.

    Raises ModelError naming the first that differs.
    """
    real = {name: parameter.shape for name, parameter in build_lm(plan.config).named_parameters()}
    for name, shape in plan.stage_shapes(stage).items():
        if real.get(name) != shape:
            raise ModelError(
                f"stage {stage.index} holds {name} of shape {tuple(shape)}, the unsplit model "
                f"{tuple(real[name]) if name in real else 'has no such parameter'}"
            )
    layers = range(stage.start, stage.stop)
    missing = [
        name
        for name in real
        if plan.part_of(name) in layers and name not in plan.stage_shapes(stage)
    ]
    if missing:
        raise ModelError(f"stage {stage.index} lacks {missing[0]} of the unsplit model")


def _delta(shape: torch.Size, seed: int) -> Tensor:
    """A made-up pseudo-gradient, of the size that inner steps make."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).normal_(0.0, 1e-4, generator=generator)


def _mean(tables: list[CodecTable], messages: list[Tensor], name: str, shape: torch.Size) -> Tensor:
    mean: Tensor | None = None
    for table, message in zip(tables, messages, strict=True):
        ((_, value),) = table.decode(message, {name: shape}, 0)
        if mean is None:
            mean = value.mul_(1 / _CLUSTERS)
        else:
            mean.add_(value, alpha=1 / _CLUSTERS)
    assert mean is not None
    return mean


def _peak() -> int:
    """Most bytes that this process has held in memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
