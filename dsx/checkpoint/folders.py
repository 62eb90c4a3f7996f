"""Where checkpoints lie, which are complete, and how they come and go.

```
RUN/checkpoints/CLUSTER/step-00000100/      a cluster's own part
RUN/checkpoints/shared/round-000005-DIGEST/ theta and outer momentum, once for all clusters
```
A folder is a checkpoint once it has a sound manifest. The name of a shared part says its content,
so that whoever writes it writes the same.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from dsx.checkpoint.manifest import (
    MANIFEST,
    ClusterManifest,
    FileRecord,
    SharedManifest,
    read_manifest,
    sync_folder,
)
from dsx.checkpoint.tensor_file import read_tensor
from dsx.errors import CheckpointError, DamagedCheckpointError

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
SHARED = "shared"
UNFINISHED = ".step-*"
"""Folders of a cluster that are not complete yet."""
REMOVED = ".removed-*"
"""What is being deleted."""


HELD = ".held-*"
"""In a folder that a cluster reads or writes while another one, which goes on, might delete it."""
_HELD_SECONDS = 3600.0
"""After so long, whoever held it has died."""


def rank_file(rank: int) -> str:
    """The file in which rank `rank` writes its tensors."""
    return f"rank-{rank:05}.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint of a cluster, with the shared part that it refers to."""

    folder: Path
    manifest: ClusterManifest
    shared: SharedManifest | None

    @property
    def shared_folder(self) -> Path:
        return self.folder.parent.parent / SHARED / str(self.manifest.shared)

    @property
    def far(self) -> tuple[int, int, bool]:
        """How far it is: the larger, the farther."""
        return self.manifest.round, self.manifest.step, self.manifest.flushed

    def tensors(self, prefix: str) -> "StoredTensors":
        """The own part's tensors below `prefix` ("master/"), by the rest of their key."""
        return StoredTensors(self.folder, self.manifest.files, prefix)

    def shared_tensors(self, prefix: str) -> "StoredTensors":
        """The shared part's tensors below `prefix` ("theta/", "momentum/")."""
        files = self.shared.files if self.shared is not None else {}
        return StoredTensors(self.shared_folder, files, prefix)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, read and checked one at a time when they are asked for.

    Raises CheckpointError on access to a damaged one.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._records = {
            key.removeprefix(prefix): (file, key, tensor)
            for file, record in files.items()
            for key, tensor in record.tensors.items()
            if key.startswith(prefix)
        }

    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(entry[2].shape) for name, entry in self._records.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        file, key, record = self._records[name]
        return read_tensor(self._folder / file, key, record)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


@dataclass(frozen=True)
class Listing:
    """What there is of one cluster."""

    complete: list[Checkpoint]
    """Newest first."""
    damaged: list[str]
    """What is wrong with the others, naming their paths."""
    unfinished: list[Path]
    """Left by a save that was interrupted (or that is under way)."""


class RunFolder:
    """The checkpoints of a run folder."""

    def __init__(self, run_dir: Path | str) -> None:
        self.path = Path(run_dir) / CHECKPOINTS

    def clusters(self) -> list[str]:
        """Names of the clusters that have a folder here, sorted."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if p.is_dir() and p.name != SHARED)

    def cluster_folder(self, cluster: str) -> Path:
        return self.path / cluster

    def list(self, cluster: str) -> Listing:
        """Every checkpoint of `cluster`; folders that are being written don't count."""
        folder = self.cluster_folder(cluster)
        found = Listing([], [], sorted(folder.glob(UNFINISHED)))
        if not folder.is_dir():
            return found
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not path.is_dir():
                continue
            try:
                found.complete.append(open_checkpoint(path))
            except CheckpointError as error:
                found.damaged.append(str(error))
        found.complete.sort(key=lambda checkpoint: -checkpoint.manifest.sequence)
        return found

    def hold(self, checkpoint: Checkpoint, cluster: str) -> None:
        """Keep what `cluster` is about to read from being deleted by others, until `release`."""
        for folder in (checkpoint.folder, checkpoint.shared_folder):
            with suppress(FileNotFoundError):  # what is gone will be told by who reads it
                hold(folder, cluster)

    def release(self, checkpoint: Checkpoint, cluster: str) -> None:
        """It has been read."""
        for folder in (checkpoint.folder, checkpoint.shared_folder):
            release(folder, cluster)

    def retain(self, cluster: str, keep: int) -> None:
        """Delete all but the newest `keep` of `cluster`, and shared parts that nobody refers to."""
        complete = self.list(cluster).complete
        for checkpoint in complete[keep:]:
            if not _is_held(checkpoint.folder):
                _remove(checkpoint.folder)
        if not complete:
            return
        oldest = (complete[:keep][-1].folder / MANIFEST).stat().st_mtime
        needed = {
            checkpoint.manifest.shared
            for name in self.clusters()
            for checkpoint in self.list(name).complete
        }
        shared = self.path / SHARED
        if not shared.is_dir():
            return
        for path in shared.iterdir():
            if path.name in needed or _is_held(path):
                continue
            with suppress(FileNotFoundError):  # another cluster was faster
                # A younger one may be about to be referred to.
                if path.stat().st_mtime < oldest:
                    _remove(path)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises CheckpointError when it is missing or damaged."""
    manifest = read_manifest(folder, ClusterManifest)
    if manifest.shared is None:
        return Checkpoint(folder, manifest, None)
    shared = folder.parent.parent / SHARED / manifest.shared
    try:
        return Checkpoint(folder, manifest, read_manifest(shared, SharedManifest))
    except DamagedCheckpointError as error:
        text = f"{folder} lacks its shared part: {error}"
        raise DamagedCheckpointError(text, error.path) from error


def hold(folder: Path, cluster: str) -> None:
    """Keep a folder from being deleted by other clusters, until `release` or for an hour."""
    (folder / HELD.replace("*", cluster)).touch()


def release(folder: Path, cluster: str) -> None:
    """The other way round."""
    (folder / HELD.replace("*", cluster)).unlink(missing_ok=True)


def _is_held(folder: Path) -> bool:
    since = time.time() - _HELD_SECONDS
    for mark in folder.glob(HELD):
        with suppress(FileNotFoundError):  # released meanwhile
            if mark.stat().st_mtime > since:
                return True
    return False


def _remove(folder: Path) -> None:
    """Out of sight first: a folder that is half deleted must not look damaged."""
    hidden = folder.with_name(f".removed-{folder.name}")
    folder.rename(hidden)
    sync_folder(folder.parent)
    shutil.rmtree(hidden, ignore_errors=True)
