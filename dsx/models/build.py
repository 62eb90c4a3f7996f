"""Cuts a skeleton down to one stage and gives it memory and initial weights."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dsx.errors import ModelError
from dsx.models.anatomy import NotHere
from dsx.models.initialise import initialise, materialise, require_initialised
from dsx.models.partition import StageRange
from dsx.models.skeleton import Skeleton
from dsx.models.stage import Stage


def build_stage(
    skeleton: Skeleton, stage_range: StageRange, seed: int | None, activation_checkpointing: bool
) -> Stage:
    """Makes the stage `stage_range` out of `skeleton`, which is used up by it.

    Only this stage's tensors get memory (fp32, CPU). With a seed they get the library's initial
    weights, the same for every number of stages; without one parameters are NaN until a
    checkpoint is loaded.

    Raises ModelError if the family can't be initialised or its layers can't be recomputed.
    """
    lm, decoder, anatomy, layers = (
        skeleton.lm,
        skeleton.decoder,
        skeleton.anatomy,
        skeleton.layers,
    )
    family = lm.config.model_type
    first, last = stage_range.is_first, stage_range.is_last
    own_layers = list(layers)[stage_range.start : stage_range.stop]
    elsewhere = [m for i, m in enumerate(layers) if not stage_range.start <= i < stage_range.stop]
    # The output layer's copy of a tied matrix is initialised as the embedding that it equals.
    embedding = getattr(decoder, anatomy.embedding)
    if not first and not (last and skeleton.tied):
        elsewhere.append(embedding)
    for stubs, here in ((anatomy.first_only, first), (anatomy.last_only, last)):
        if not here:
            elsewhere += [getattr(decoder, n) for n in stubs if getattr(decoder, n) is not None]

    root = lm if last else decoder
    own = list(_walk(root, {id(m) for m in elsewhere}))
    paths = {id(m): path for path, m in lm.named_modules()}
    # A matrix that the embedding shares with the output layer has the embedding's weights.
    order = [m for m in reversed(own) if not isinstance(m, PreTrainedModel)]
    order.sort(key=lambda m: m is embedding)
    replaced = materialise(own)
    initialise(lm, ((paths[id(m)], m) for m in order), seed)

    setattr(decoder, anatomy.layers, nn.ModuleList(own_layers))
    decoder.config = _cut_config(lm.config, stage_range, len(layers))
    if not first:
        setattr(decoder, anatomy.embedding, NotHere())
    for stubs, here in ((anatomy.first_only, first), (anatomy.last_only, last)):
        if not here:
            for name, stub in stubs.items():
                setattr(decoder, name, stub())

    names = {id(new): skeleton.names[old] for old, new in replaced.items() if old in skeleton.names}
    stage = Stage(root, lm.config, stage_range, names, skeleton.tied)
    if seed is not None:
        require_initialised(stage, family)
    if activation_checkpointing:
        _checkpoint(own_layers, family)
    return stage


def _walk(module: nn.Module, skip: set[int]) -> Iterator[nn.Module]:
    if id(module) not in skip:
        yield module
        for child in module.children():
            yield from _walk(child, skip)


def _cut_config(config: PretrainedConfig, stage_range: StageRange, total: int) -> PretrainedConfig:
    """A config for a decoder of these layers only: depth and per-layer lists are cut to them."""
    cut = copy.deepcopy(config)
    values: dict[str, Any] = vars(cut)  # past the validation, which forbids a cut depth
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            values[name] = value[stage_range.start : stage_range.stop]
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    values[depth] = stage_range.stop - stage_range.start
    return cut


def _checkpoint(layers: list[nn.Module], family: str) -> None:
    """Recomputes each layer in the backward pass, by the library's own switch."""
    recompute = partial(checkpoint, use_reentrant=False)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ModelError(
                f"transformers can't recompute the layers of {family!r}; set "
                "dsx.pipeline.activation_checkpointing to false"
            )
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = recompute
