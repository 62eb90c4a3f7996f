"""Which checkpoint a cluster goes on from."""

from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.folders import CHECKPOINTS, SHARED, Checkpoint, RunFolder, open_checkpoint
from dsx.checkpoint.manifest import MANIFEST, ClusterManifest
from dsx.errors import CheckpointError


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from."""

    checkpoint: Checkpoint
    own: bool
    """False: it is another cluster's; this one starts from the shared weights, with the other's
    optimizer moments."""
    notes: tuple[str, ...] = ()
    """What the user should know: damaged or unfinished checkpoints that were passed over."""


def choose(run_dir: Path | str, cluster: str, resume: str) -> Choice | None:
    """The checkpoint that `--resume` means for `cluster`; None for a fresh start.

    `auto`: the newest complete one of this cluster for which all clusters that have checkpoints
    here have one of the same round, else the newest; a cluster without any starts from another
    cluster's. `never`: none, and the run folder must hold none. Else a run folder, or the folder
    of one checkpoint.

    Raises:
        CheckpointError: naming the path of what is missing or damaged.
    """
    if cluster == SHARED:
        raise CheckpointError(f"a cluster can't be called {SHARED!r}; choose another --cluster")
    here = RunFolder(run_dir)
    if resume == "never":
        listing = here.list(cluster)
        if listing.complete or listing.damaged:
            raise CheckpointError(
                f"--resume never, but {here.cluster_folder(cluster)} holds checkpoints of an "
                "earlier run; choose another dsx.run_dir, remove that folder, or resume"
            )
        return None
    if resume == "auto":
        return _newest(here, cluster)
    return _at(Path(resume), cluster)


def is_finished(checkpoint: Checkpoint, steps: int) -> bool:
    """Whether nothing is left to do in a run of `steps` steps (0 leaves the evaluation)."""
    return checkpoint.manifest.flushed and 0 < steps <= checkpoint.manifest.step


def finished(run_dir: Path | str, cluster: str, steps: int) -> bool:
    """Whether `auto` would find nothing left to do for `cluster` in a run of `steps` steps.

    Raises:
        CheckpointError: as `choose`.
    """
    choice = choose(run_dir, cluster, "auto")
    return choice is not None and choice.own and is_finished(choice.checkpoint, steps)


def saved_since(run_dir: Path | str, cluster: str, moment: float) -> bool:
    """Whether `cluster` has completed a checkpoint that was begun after `moment` (Unix seconds)."""
    complete = RunFolder(run_dir).list(cluster).complete
    return bool(complete) and complete[0].manifest.time >= moment


def _newest(folder: RunFolder, cluster: str) -> Choice | None:
    listing = folder.list(cluster)
    notes = [f"passed over: {problem}" for problem in listing.damaged]
    notes += [
        f"{path} was never completed: its save was interrupted" for path in listing.unfinished
    ]
    if listing.complete:
        joint = next((c for c in listing.complete if _is_joint(folder, c)), None)
        return Choice(joint or listing.complete[0], True, tuple(notes))
    if listing.damaged:
        raise CheckpointError(
            f"{folder.cluster_folder(cluster)} has no usable checkpoint: "
            f"{'; '.join(listing.damaged)}. Start from another with --resume PATH, or remove the "
            "folder to start afresh"
        )
    others = [folder.list(name).complete for name in folder.clusters() if name != cluster]
    candidates = [found[0] for found in others if found and found[0].manifest.shared is not None]
    if not candidates:
        return None
    return Choice(max(candidates, key=lambda c: c.manifest.round), False, tuple(notes))


def _is_joint(folder: RunFolder, checkpoint: Checkpoint) -> bool:
    """Whether the others that have checkpoints here can go on from the same round.

    A cluster that has a pseudo-gradient on the wire may also go on beside one that has already
    applied it.
    """
    manifest = checkpoint.manifest
    for name in manifest.clusters:
        if name == manifest.cluster:
            continue
        others = [other.manifest for other in folder.list(name).complete]
        if others and not any(_fit(manifest, other) for other in others):
            return False
    return True


def _fit(one: ClusterManifest, other: ClusterManifest) -> bool:
    low, high = sorted((one, other), key=lambda manifest: manifest.round)
    if low.round == high.round:
        return True
    in_flight = low.outer is not None and low.outer.get("flight") is not None
    return high.round == low.round + 1 and in_flight


def _at(path: Path, cluster: str) -> Choice:
    if (path / MANIFEST).exists():
        return _single(path, cluster)
    run_dir = path.parent if path.name == CHECKPOINTS else path
    if not (run_dir / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"--resume {path}: there is neither a run folder with {CHECKPOINTS}/ nor a checkpoint "
            f"with a {MANIFEST}; give one of them"
        )
    choice = _newest(RunFolder(run_dir), cluster)
    if choice is None:
        raise CheckpointError(f"--resume {path}: {run_dir / CHECKPOINTS} holds no checkpoint")
    return choice


def _single(path: Path, cluster: str) -> Choice:
    checkpoint = open_checkpoint(path)
    if checkpoint.manifest.cluster == cluster:
        return Choice(checkpoint, True)
    # One path may be given to all clusters of a run: each takes its own of the same moment.
    run_dir = path.resolve().parent.parent.parent
    for own in RunFolder(run_dir).list(cluster).complete:
        if _fit(own.manifest, checkpoint.manifest):
            return Choice(own, True)
    if checkpoint.shared is None:
        raise CheckpointError(
            f"{path} is cluster {checkpoint.manifest.cluster}'s, and has no shared weights from "
            f"which {cluster} could start; give --cluster {checkpoint.manifest.cluster}"
        )
    return Choice(checkpoint, False)
