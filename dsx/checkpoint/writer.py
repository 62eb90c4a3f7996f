"""Writes checkpoints in the background, all ranks of a cluster together.

Every rank writes its own file; the manifest comes last, and with it the folder's final name. A
process that dies on the way leaves a folder whose name begins with a dot, which is no checkpoint.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dsx.checkpoint.folders import (
    REMOVED,
    SHARED,
    UNFINISHED,
    RunFolder,
    hold,
    rank_file,
    release,
)
from dsx.checkpoint.manifest import (
    MANIFEST,
    ClusterManifest,
    FileRecord,
    SharedManifest,
    read_manifest,
    sync_folder,
    write_manifest,
)
from dsx.checkpoint.tensor_file import describe_tensors, write_tensors
from dsx.errors import CheckpointError
from dsx.spans import span

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
PATIENCE_SECONDS = 30.0
"""How long another cluster's file may stand still before this one writes it itself."""


@dataclass(frozen=True)
class SharedPart:
    """This rank's share of theta and outer momentum."""

    name: str
    """Folder of the part; it says the content."""
    progress: dict[str, Any]
    tensors: Mapping[str, torch.Tensor] | None
    """None where the folder is complete already."""


@dataclass(frozen=True)
class Job:
    """What this rank has to write: tensors in host memory that nobody changes any more."""

    manifest: ClusterManifest
    """All but `sequence` and `files`."""
    tensors: Mapping[str, torch.Tensor]
    shared: SharedPart | None


class WriterAgreement(Protocol):
    """Collectives among the ranks of a cluster, for the writer's thread alone."""

    def broadcast(self, decision: Any = None) -> Any:
        """Rank 0's `decision`."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in rank order."""
        ...


class CheckpointWriter:
    """The background writer of one rank. `start` and `wait` are collective.

    Args:
        run_dir: the run folder; one file system for all ranks of the cluster.
        keep: complete checkpoints that are kept.
        rank: this rank in its cluster.
        agreement: used beside the training thread's, and so not the same.
    """

    def __init__(
        self,
        run_dir: Path | str,
        cluster: str,
        keep: int,
        rank: int,
        agreement: WriterAgreement,
    ) -> None:
        self.seconds = 0.0
        """That the last write took, from its start to the complete checkpoint."""
        self.bytes = 0
        """That this rank wrote for the last checkpoint."""
        self.on_file: Callable[[], None] = lambda: None
        """Called when this rank has written its file, and the checkpoint is not complete yet."""
        self._folder = RunFolder(run_dir)
        self._cluster = cluster
        self._keep = keep
        self._rank = rank
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None
        self._last: Path | None = None

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes."""
        return self._pending is not None and not self._pending.done()

    def has_shared(self, name: str) -> bool:
        """Whether the shared part `name` is complete on the disk."""
        return (self._folder.path / SHARED / name / MANIFEST).exists()

    def start(self, job: Job, *, tell: bool = True) -> None:
        """Begin to write. Waits for an earlier write.

        Raises nothing: what goes wrong is raised by `wait`.

        Args:
            tell: log a failure as soon as it is known; else it is for `wait` to raise.
        """
        self._settle()
        self._pending = self._thread.submit(self._write, job)
        if tell and self._rank == 0:
            self._pending.add_done_callback(_tell_failure)

    def wait(self) -> Path | None:
        """The folder of the last checkpoint, once it is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._last = pending.result()
        return self._last

    def close(self) -> None:
        """Finish writing."""
        self._settle()
        self._thread.shutdown(wait=True)

    def _settle(self) -> None:
        """Wait for a write whose failure was told when it happened."""
        with suppress(CheckpointError):
            self.wait()

    def _write(self, job: Job) -> Path:
        began = time.perf_counter()
        self.bytes = 0
        parts: tuple[FileRecord, FileRecord | None] | None = None
        problem = None
        folder = self._agreement.broadcast(self._guarded_begin(job) if self._rank == 0 else None)
        try:
            if isinstance(folder, OSError):
                raise folder
            with span("write"):
                parts = self._write_files(Path(folder), job)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = f"rank {self._rank}: {error}"
        everybody = self._agreement.gather((parts, problem))
        problems = [problem for _, problem in everybody if problem is not None]
        result: Path | str = "; ".join(problems)
        if self._rank == 0 and not problems:
            try:
                result = self._complete(Path(folder), job, [parts for parts, _ in everybody])
            except Exception as error:
                result = str(error)
        result = self._agreement.broadcast(result)
        self.seconds = time.perf_counter() - began
        if self._rank == 0 and job.shared is not None:
            release(self._folder.path / SHARED / job.shared.name, self._cluster)
        if isinstance(result, str):
            if self._rank == 0 and isinstance(folder, Path):
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {job.manifest.step} could not be written to "
                f"{self._folder.cluster_folder(self._cluster)}: {result}"
            )
        return result

    # ------------------------------------------------------------------ the files of all ranks

    def _guarded_begin(self, job: Job) -> Path | OSError:
        try:
            return self._begin(job)
        except OSError as error:
            return error

    def _begin(self, job: Job) -> Path:
        """The empty folder that all ranks write into."""
        parent = self._folder.cluster_folder(self._cluster)
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(UNFINISHED):
            log.warning("removed %s, which was never completed", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in parent.glob(REMOVED):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = parent / f".step-{job.manifest.step:08}"
        folder.mkdir()
        if job.shared is not None:
            self._begin_shared(self._folder.path / SHARED / job.shared.name)
        return folder

    def _begin_shared(self, folder: Path) -> None:
        """Others, which are done with an old one of this name, may be deleting it just now."""
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                hold(folder, self._cluster)
                return

    def _write_files(self, folder: Path, job: Job) -> tuple[FileRecord, FileRecord | None]:
        shared_record = None
        deferred = None
        if job.shared is not None and job.shared.tensors is not None:
            shared_record = describe_tensors(job.shared.tensors)
            target = self._folder.path / SHARED / job.shared.name / rank_file(self._rank)
            if not self._claim_and_write(target, job.shared.tensors):
                deferred = target
        record = describe_tensors(job.tensors)
        write_tensors(folder / rank_file(self._rank), job.tensors)
        self.on_file()
        self.bytes += record.bytes
        sync_folder(folder)
        if deferred is not None and job.shared is not None and job.shared.tensors is not None:
            self._await(deferred, job.shared.tensors)
        return record, shared_record

    def _claim_and_write(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Write a file of the shared part, unless another cluster on this disk is at it."""
        if target.exists():
            return True
        claim = target.with_name(f".{target.name}.claim")
        try:
            write_tensors(claim, tensors)
        except FileExistsError:
            return False
        claim.rename(target)
        self.bytes += target.stat().st_size
        return True

    def _await(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait for the file that another cluster writes; write it when nothing moves there."""
        claim = target.with_name(f".{target.name}.claim")
        seen = (-1, time.monotonic())
        while not target.exists():
            try:
                size = claim.stat().st_size
            except FileNotFoundError:
                size = seen[0]
            if size != seen[0]:
                seen = (size, time.monotonic())
            if time.monotonic() - seen[1] > PATIENCE_SECONDS:
                own = target.with_name(f".{target.name}.{self._cluster}")
                own.unlink(missing_ok=True)
                write_tensors(own, tensors)
                own.rename(target)
                claim.unlink(missing_ok=True)
                self.bytes += target.stat().st_size
                return
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ rank 0

    def _complete(
        self, folder: Path, job: Job, parts: list[tuple[FileRecord, FileRecord | None]]
    ) -> Path:
        """Manifests, final name, retention."""
        own = {rank_file(rank): record for rank, (record, _) in enumerate(parts)}
        _require_files(folder, own)
        if job.shared is not None and job.shared.tensors is not None:
            shared = self._folder.path / SHARED / job.shared.name
            files = {rank_file(r): record for r, (_, record) in enumerate(parts) if record}
            _require_files(shared, files)
            if not (shared / MANIFEST).exists():
                sync_folder(shared)
                write_manifest(shared, SharedManifest(progress=job.shared.progress, files=files))
                sync_folder(shared.parent)
        if job.shared is not None:
            read_manifest(self._folder.path / SHARED / job.shared.name, SharedManifest)
        listing = self._folder.list(self._cluster)
        sequence = 1 + max((c.manifest.sequence for c in listing.complete), default=0)
        manifest = job.manifest.model_copy(update={"sequence": sequence, "files": own})
        write_manifest(folder, manifest)
        final = _free_name(folder.with_name(folder.name.removeprefix(".")))
        folder.rename(final)
        sync_folder(final.parent)
        try:
            self._folder.retain(self._cluster, self._keep)
        except OSError as error:  # what was written is good all the same
            log.warning("old checkpoints could not be deleted: %s", error)
        return final


def _tell_failure(write: "Future[Path]") -> None:
    error = write.exception()
    if error is not None:
        log.error(
            "%s. Training goes on, the checkpoints before it are untouched, and another is tried "
            "when the next one is due",
            error,
        )


def _free_name(path: Path) -> Path:
    """`path`, or with a number where an earlier history of the run has taken it."""
    number = 2
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free


def _require_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    for name, record in files.items():
        size = os.stat(folder / name).st_size if (folder / name).exists() else None
        if size != record.bytes:
            raise OSError(
                f"{folder / name} has {size} of {record.bytes} bytes as rank 0 sees it; all ranks "
                "of a cluster must see one run folder"
            )
