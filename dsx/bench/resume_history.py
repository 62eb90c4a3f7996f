"""What a run leaves behind, without times: equal for two runs that are the same bit for bit."""

from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.folders import RunFolder
from dsx.checkpoint.manifest import FileRecord
from dsx.tracking.events import OuterEvent, latest_by_step, metrics_path, read_file


@dataclass(frozen=True)
class History:
    """Of one cluster of a run."""

    losses: list[tuple[int, float, float]]
    """(inner step, loss, gradient norm), each as it was last made."""
    digests: dict[int, str]
    """Round -> digest of the shared weights."""
    step: int
    """Of the last checkpoint."""
    files: dict[str, FileRecord]
    """Sizes, shapes and checksums of everything in the last checkpoint."""


def history(run_dir: Path, cluster: str) -> History:
    """Of a run that has come to its end."""
    events = read_file(metrics_path(run_dir, cluster))
    checkpoint = RunFolder(run_dir).list(cluster).complete[0]
    files = dict(checkpoint.manifest.files)
    if checkpoint.shared is not None:
        files |= {f"shared {name}": file for name, file in checkpoint.shared.files.items()}
    return History(
        [(event.step, event.loss, event.grad_norm) for event in latest_by_step(events)],
        {event.round: event.shared_digest for event in events if isinstance(event, OuterEvent)},
        checkpoint.manifest.step,
        files,
    )
