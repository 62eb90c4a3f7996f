"""From a checkpoint to a Hugging Face folder: no process group, one layer in memory at a time."""

import json
import logging
import shutil
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from dsx.checkpoint.damage import advised, nothing_usable, older
from dsx.checkpoint.folders import Checkpoint, RunFolder, open_checkpoint
from dsx.errors import CheckpointError
from dsx.models.config import config_from_dict
from dsx.models.export import export_hf

log = logging.getLogger(__name__)

Dtype = Literal["bf16", "fp32"]
TOKENIZER = "tokenizer"
"""The tokenizer's folder in a run folder."""

ORIGIN = "dsx_export.json"
"""In an exported folder: where its weights are from. Marks it as one that may be replaced."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Exported:
    """Which weights an export holds."""

    output: Path
    checkpoint: Path
    cluster: str
    weights: Literal["shared", "local"]
    """Those that the clusters hold alike, or this cluster's own where there was no exchange."""
    round: int
    step: int
    flushed: bool
    """Whether everything that the cluster had trained is in them."""
    dtype: Dtype

    def __str__(self) -> str:
        which = f"the {self.weights} weights of cluster {self.cluster} at step {self.step}"
        if self.weights == "shared":
            rest = "flushed" if self.flushed else "not flushed: later inner steps are not in them"
            which = (
                f"the shared weights after round {self.round} ({rest}; cluster {self.cluster} at "
                f"step {self.step})"
            )
        return f"{self.output}: {which}, {self.dtype}, from {self.checkpoint}"


def newest_checkpoint(run_dir: Path | str) -> Checkpoint:
    """The checkpoint of the run that is furthest; damaged ones are told and left out.

    Raises:
        CheckpointError: there is none.
    """
    folder = RunFolder(run_dir)
    listings = [folder.list(cluster) for cluster in folder.clusters()]
    newest = [listing.complete[0] for listing in listings if listing.complete]
    damaged = [problem for listing in listings for problem in listing.damaged]
    if newest:
        for problem in damaged:
            log.warning("left out: %s", problem)
        return max(newest, key=lambda checkpoint: checkpoint.far)
    nothing = f"{run_dir} holds no complete checkpoint"
    if damaged:
        raise nothing_usable(
            nothing,
            damaged,
            "bring one of them back from a copy, or export one from elsewhere with --checkpoint",
        )
    raise CheckpointError(f"{nothing}; give the folder of a run to --run")


def _complete(run_dir: Path | str) -> list[Checkpoint]:
    """Of all clusters, newest first."""
    folder = RunFolder(run_dir)
    found = [each for cluster in folder.clusters() for each in folder.list(cluster).complete]
    return sorted(found, key=lambda checkpoint: checkpoint.far, reverse=True)


def export_run(
    run_dir: Path | str,
    output: Path | str,
    dtype: Dtype | None = None,
    checkpoint: Path | str | None = None,
) -> Exported:
    """Write the weights of a run as a Hugging Face folder.

    Args:
        run_dir: the run folder.
        output: a folder that is empty or does not exist, or an earlier export, which is replaced
            once the new one is complete.
        dtype: of the weights; by default that in which the model computed.
        checkpoint: the folder of one checkpoint; by default the newest of the run.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ModelError: `output` is in use.
    """
    if checkpoint is not None:
        with advised("--checkpoint", lambda _: _complete(run_dir)):
            found = open_checkpoint(Path(checkpoint))
        return _export(Path(run_dir), found, Path(output), dtype)
    while True:
        found = newest_checkpoint(run_dir)
        try:
            return _export(Path(run_dir), found, Path(output), dtype)
        except CheckpointError:
            # A run that goes on removes it when it has `keep` newer ones.
            if found.folder.exists():
                raise


def _export(run_dir: Path, found: Checkpoint, output: Path, dtype: Dtype | None) -> Exported:
    manifest = found.manifest
    bf16 = (manifest.settings.get("bf16") or {}).get("enabled", False)
    chosen: Dtype = dtype or ("bf16" if bf16 else "fp32")
    shared = found.shared is not None
    weights = found.shared_tensors("theta/") if shared else found.tensors("master/")
    layers = cast("list[MutableMapping[str, torch.Tensor]]", [weights, found.tensors("buffer/")])
    model = manifest.settings["dsx"]["model"]
    tokenizer = run_dir / TOKENIZER
    replaces = (output / ORIGIN).is_file()
    target = output.with_name(f"{output.name}.new") if replaces else output
    if replaces:
        shutil.rmtree(target, ignore_errors=True)
    has_tokenizer = tokenizer.is_dir()
    with advised("--checkpoint", lambda path: older(found, path, _complete(run_dir))):
        export_hf(
            config_from_dict(manifest.model),
            ChainMap(*layers),
            tokenizer if has_tokenizer else None,
            target,
            _DTYPES[chosen],
            generation_from=model["path"] if model["init"] == "pretrained" else None,
        )
    if not has_tokenizer:
        log.warning(
            "%s is not there, so %s has no tokenizer: put that of the run beside the weights",
            *(tokenizer, output),
        )
    exported = Exported(
        output=output,
        checkpoint=found.folder,
        cluster=manifest.cluster,
        weights="shared" if shared else "local",
        round=manifest.round,
        step=manifest.step,
        flushed=manifest.flushed,
        dtype=chosen,
    )
    (target / ORIGIN).write_text(json.dumps(asdict(exported), default=str, indent=1) + "\n")
    if replaces:
        shutil.rmtree(output)
        target.rename(output)
    return exported
