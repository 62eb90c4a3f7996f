"""Which checkpoint a cluster goes on from."""

from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.damage import advised, nothing_usable
from dsx.checkpoint.folders import CHECKPOINTS, SHARED, Checkpoint, RunFolder, open_checkpoint
from dsx.checkpoint.manifest import MANIFEST, ClusterManifest
from dsx.errors import CheckpointError
from dsx.outer.state import Progress


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from."""

    checkpoint: Checkpoint
    own: bool
    """False: it is another cluster's; this one starts from the shared weights, with the other's
    optimizer moments."""
    notes: tuple[str, ...] = ()
    """What the user should know: damaged or unfinished checkpoints that were passed over."""
    ahead: Checkpoint | None = None
    """Another cluster's, with a newer shared state: with that one this cluster goes on, too."""

    def finished(self, steps: int) -> Checkpoint | None:
        """The checkpoint after which nothing is left to do in a run of `steps` steps."""
        candidates = (self.checkpoint if self.own else None, self.ahead)
        return next((c for c in candidates if c is not None and is_finished(c, steps)), None)


def choose(run_dir: Path | str, cluster: str, resume: str) -> Choice | None:
    """The checkpoint that `--resume` means for `cluster`; None for a fresh start.

    `auto`: the newest complete one of this cluster, and the newest shared state that any cluster
    has here; a cluster without any starts from another cluster's. `never`: none, and the run folder
    must hold none. Else a run folder, or the folder of one checkpoint.

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
    return choice is not None and choice.finished(steps) is not None


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
    newest = [folder.list(name).complete[:1] for name in folder.clusters() if name != cluster]
    others = [found for each in newest for found in each if found.shared is not None]
    if listing.complete:
        own = listing.complete[0]
        ahead = [found for found in others if _is_ahead(found, own)]
        return Choice(own, True, tuple(notes), max(ahead, key=_version, default=None))
    if listing.damaged:
        raise nothing_usable(
            f"{folder.cluster_folder(cluster)} has no usable checkpoint",
            listing.damaged,
            "start from another with --resume PATH, or remove the folder to start afresh",
        )
    if not others:
        return None
    return Choice(max(others, key=_version), False, tuple(notes))


def _is_ahead(other: Checkpoint, own: Checkpoint) -> bool:
    """Whether the other has a newer shared state of the same run."""
    if own.shared is None:
        return False
    return _progress(other).began == _progress(own).began and _version(other) > _version(own)


def _version(checkpoint: Checkpoint) -> tuple[int, int]:
    return _progress(checkpoint).version


def _progress(checkpoint: Checkpoint) -> Progress:
    assert checkpoint.shared is not None
    return Progress.model_validate(checkpoint.shared.progress)


def _fit(one: ClusterManifest, other: ClusterManifest) -> bool:
    """Whether clusters with these checkpoints go on from one moment.

    A cluster that has a pseudo-gradient on the wire may also go on beside one that has already
    applied it.
    """
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
    folder = RunFolder(path.resolve().parent.parent.parent)
    with advised("--resume", lambda _: folder.list(cluster).complete):
        checkpoint = open_checkpoint(path)
    if checkpoint.manifest.cluster == cluster:
        return Choice(checkpoint, True)
    # One path may be given to all clusters of a run: each takes its own of the same moment.
    for own in folder.list(cluster).complete:
        if _fit(own.manifest, checkpoint.manifest):
            return Choice(own, True)
    if checkpoint.shared is None:
        raise CheckpointError(
            f"{path} is cluster {checkpoint.manifest.cluster}'s, and has no shared weights from "
            f"which {cluster} could start; give --cluster {checkpoint.manifest.cluster}"
        )
    return Choice(checkpoint, False)
