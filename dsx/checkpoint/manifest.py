"""`manifest.json`: what a checkpoint folder holds. Written last, so that it marks completeness."""

import json
import os
import zlib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dsx.errors import CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TensorRecord(_Record):
    """One tensor in a file."""

    shape: list[int]
    crc32: int
    """Of its raw bytes."""


class FileRecord(_Record):
    """One safetensors file."""

    bytes: int
    tensors: dict[str, TensorRecord]


class SharedManifest(_Record):
    """The part that all clusters hold alike: theta and outer momentum after a round.

    Keys of its tensors: `theta/NAME`, `momentum/NAME`.
    """

    format: Literal[1] = 1
    kind: Literal["shared"] = "shared"
    progress: dict[str, Any]
    """The scalars of the shared state (`dsx.outer.state.Progress`)."""
    files: dict[str, FileRecord]


class Layout(_Record):
    """How the ranks of a cluster shared the model."""

    stages: int
    replicas: int

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas


class DataPosition(_Record):
    """Which samples come next."""

    digest: str
    """Of the prepared data."""
    position: int = 0
    """The next one in the run's order, without other clusters; with them, leases say."""


class ClusterManifest(_Record):
    """One cluster's own part.

    Keys of its tensors: `master/NAME`, `moment/KIND/NAME`, `buffer/NAME`, `outer/PART/NAME` and
    `rng/RANK/GENERATOR`; NAME is the parameter's name in the HF state dict, and has no slash.
    """

    format: Literal[1] = 1
    kind: Literal["cluster"] = "cluster"
    run: str
    cluster: str
    sequence: int
    """Counts a cluster's checkpoints; the largest is the newest."""
    time: float
    step: int
    """Inner steps made."""
    evaluated_at: int
    flushed: bool
    """Nothing in flight, and no step since the last exchange."""
    layout: Layout
    data: DataPosition
    clusters: list[str]
    """Those that made the last committed round, this one included."""
    optimizer_steps: int
    moments: list[str]
    shared: str | None
    """Folder of the shared part, beside the clusters' folders; None without an outer engine."""
    round: int
    """Rounds committed."""
    outer: dict[str, Any] | None
    """The scalars of this cluster's outer engine."""
    settings: dict[str, Any]
    model: dict[str, Any]
    """The HF config."""
    tracking: dict[str, str]
    files: dict[str, FileRecord]


Manifest = TypeVar("Manifest", ClusterManifest, SharedManifest)


def write_manifest(folder: Path, manifest: ClusterManifest | SharedManifest) -> None:
    """Write `manifest.json` into `folder` at once, and have it brought to the disk."""
    # Through text once, so that what is summed is what will be read.
    body = json.loads(json.dumps(manifest.model_dump(mode="json")))
    body["crc32"] = _checksum(body)
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(body, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path, kind: type[Manifest]) -> Manifest:
    """The manifest of a complete checkpoint folder; every file it names is there in full.

    Raises:
        CheckpointError: naming the path and what is wrong with it.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{folder} is no complete checkpoint: it has no {MANIFEST}", folder
        ) from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}", path) from error
    if not isinstance(body, dict) or body.pop("crc32", None) != _checksum(body):
        raise DamagedCheckpointError(
            f"{path} is damaged: its checksum is not the one that was written", path
        )
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {body.get('format')}, this version of dsx reads {FORMAT}"
        )
    wanted = kind.model_fields["kind"].default
    if body.get("kind") != wanted:
        raise CheckpointError(
            f"{folder} holds the {body.get('kind')} part of checkpoints, not the {wanted} part; a "
            "checkpoint is a folder RUN/checkpoints/CLUSTER/step-..."
        )
    try:
        manifest = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DamagedCheckpointError(f"{path} is damaged: {key}: {first['msg']}", path) from error
    for name, record in manifest.files.items():
        file = folder / name
        size = file.stat().st_size if file.exists() else None
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise DamagedCheckpointError(f"{folder} is damaged: {name} {found}", folder)
    return manifest


def sync_folder(folder: Path) -> None:
    """Have the entries of `folder` brought to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
