"""Whether a checkpoint fits the run that wants to go on from it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsx.checkpoint.folders import Checkpoint
from dsx.errors import CheckpointError
from dsx.settings import Settings
from dsx.training.preflight import Preflight

# What may differ from launch to launch without a word.
_FREE = (
    "dsx.run_dir",
    "dsx.tracking",
    "dsx.checkpoint",
    "dsx.data.cache_dir",
    "dsx.pipeline",
    "dsx.outer.start_clusters",
    "dsx.outer.timeout_seconds",
)


def require_fit(
    checkpoint: Checkpoint, ready: Preflight, moments: Sequence[str], *, with_clusters: bool
) -> None:
    """Refuse what can't go on exactly, whatever the layout.

    Args:
        moments: kinds of moments of the present inner optimizer.
        with_clusters: whether this launch exchanges with others.

    Raises:
        CheckpointError: naming the checkpoint, the difference and the way out.
    """
    manifest, folder = checkpoint.manifest, checkpoint.folder
    here = dict(ready.plan.parameter_shapes)
    there = checkpoint.tensors("master/").shapes()
    if here != there:
        name = next(n for n in sorted({*here, *there}) if here.get(n) != there.get(n))
        raise CheckpointError(
            f"{folder} is of another model: {name} has shape {_shape(there.get(name))} there, "
            f"{_shape(here.get(name))} here; use the settings of that run, or another dsx.run_dir"
        )
    if manifest.data.digest != ready.data.digest:
        raise CheckpointError(
            f"{folder} was trained on other data (digest {manifest.data.digest} there, "
            f"{ready.data.digest} here), so its position in the data means nothing here; use that "
            "run's source, seq_len and tokenizer, or export it and start from that with "
            'dsx.model.init "pretrained"'
        )
    if list(moments) != manifest.moments:
        raise CheckpointError(
            f"{folder} holds the optimizer moments {manifest.moments}, the optimizer here needs "
            f"{list(moments)}; use that run's optimizer.type"
        )
    if with_clusters != (manifest.shared is not None):
        had, give = ("without", "leave out") if with_clusters else ("with", "give")
        raise CheckpointError(
            f"{folder} was trained {had} an exchange between clusters, and can't go on exactly the "
            f"other way; {give} --coordinator, or export it and start from that with "
            'dsx.model.init "pretrained"'
        )
    dropout = next(_dropouts(ready.plan.config.to_dict()), None)
    ranks = len(ready.stages) * ready.replicas
    if dropout is not None and manifest.layout.ranks != ranks:
        raise CheckpointError(
            f"{folder} was written by {manifest.layout.ranks} ranks, here are {ranks}, and the "
            f"model has dropout ({dropout}): the ranks' random numbers can't be continued exactly; "
            f"use {manifest.layout.ranks} ranks, or set the dropout to 0"
        )


def changed_settings(checkpoint: Checkpoint, settings: Settings) -> list[str]:
    """`KEY: THEN -> NOW` for every setting that matters and is another than when it was saved."""
    then = dict(_flat(checkpoint.manifest.settings))
    now = dict(_flat(json.loads(settings.model_dump_json())))
    return [
        f"{key}: {then.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key) and not key.startswith(_FREE)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _dropouts(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in _flat(config):
        chance = isinstance(value, float) and value > 0
        if chance and ("dropout" in key or "pdrop" in key or "drop" in key.split("_")):
            yield f"{key} {value}"


def _shape(shape: Sequence[int] | None) -> str:
    return "no such tensor" if shape is None else str(tuple(shape))
