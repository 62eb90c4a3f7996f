"""Checkpoints of a made-up cluster, written by the real writer."""

import time
from pathlib import Path
from typing import Any

import torch

from dsx.checkpoint.manifest import ClusterManifest, DataPosition, Layout
from dsx.checkpoint.writer import CheckpointWriter, Job, SharedPart
from dsx.outer.leases import Leases
from dsx.outer.state import Progress


class Alone:
    """A cluster of one rank."""

    def broadcast(self, decision: Any = None) -> Any:
        return decision

    def gather(self, value: Any) -> list[Any]:
        return [value]


def values(salt: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(salt)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.bias": torch.randn(7, generator=generator),
    }


def manifest(cluster: str = "c0", step: int = 10, **changes: Any) -> ClusterManifest:
    fields: dict[str, Any] = {
        "run": "made-up",
        "cluster": cluster,
        "sequence": 0,
        "time": time.time(),
        "step": step,
        "evaluated_at": 0,
        "flushed": True,
        "layout": Layout(stages=1, replicas=1),
        "data": DataPosition(digest="d"),
        "clusters": ["c0", "c1"],
        "optimizer_steps": step,
        "moments": [],
        "shared": None,
        "round": 0,
        "outer": None,
        "settings": {"dsx": {"seed": 1}, "weights": {10: "a number as key", 9: "another"}},
        "model": {},
        "tracking": {},
        "files": {},
    }
    return ClusterManifest.model_validate(fields | changes)


def job(
    cluster: str = "c0",
    step: int = 10,
    round_: int | None = None,
    leases: Leases | None = None,
    began: int = 0,
    **changes: Any,
) -> Job:
    """A checkpoint whose tensors depend on the step, and its shared part on the round."""
    tensors = {f"master/{name}": value for name, value in values(step).items()}
    if round_ is None:
        return Job(manifest(cluster, step, **changes), tensors, None)
    name = f"round-{round_:06}-{round_:032x}"
    theta = {f"theta/{name}": value for name, value in values(1000 + round_).items()}
    progress = Progress(round=round_, began=began, leases=leases or Leases())
    return Job(
        manifest(cluster, step, shared=name, round=round_, **changes),
        tensors,
        SharedPart(name, progress.model_dump(), theta),
    )


def writer(run_dir: Path, cluster: str = "c0", keep: int = 2) -> CheckpointWriter:
    return CheckpointWriter(run_dir, cluster, keep, 0, Alone())


def save(run_dir: Path, cluster: str = "c0", step: int = 10, keep: int = 2, **options: Any) -> Path:
    made = writer(run_dir, cluster, keep)
    made.start(job(cluster, step, **options))
    folder = made.wait()
    assert folder is not None
    made.close()
    return folder
