"""What the clusters of a run have on the disk, and which of them run."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dsx.checkpoint.folders import RunFolder
from dsx.outer.snapshot import EngineRecord
from dsx.outer.state import Progress
from dsx.tracking.audit import Kept
from dsx.tracking.ledger import ledger_name
from dsx.training.holding import is_held


def kept_by_stopped(run_dirs: Sequence[Path], clusters: Iterable[str]) -> dict[str, Kept]:
    """By cluster, for those that do not run: what their newest checkpoints hold.

    Args:
        run_dirs: where the clusters' ledgers are.
    """
    kept = {}
    for name in clusters:
        folders = [folder for folder in run_dirs if (folder / ledger_name(name)).exists()]
        if not any(is_held(folder, name) for folder in folders):
            found = [c for folder in folders for c in RunFolder(folder).list(name).complete]
            kept[name] = Kept()
            if found and found[0].shared is not None:
                progress = Progress.model_validate(found[0].shared.progress)
                kept[name] = Kept(
                    found[0].folder.name,
                    _unsent(found[0].manifest.outer),
                    progress.round,
                    progress.leases,
                )
    return kept


def _unsent(outer: object) -> list[tuple[int, int]]:
    record = EngineRecord.model_validate(outer)
    flight = record.flight.trained if record.flight is not None else []
    return [*flight, *record.trained]
