"""What to say about damaged checkpoints: what is wrong, a line each, and the way on.

Lines after the first are indented, by which whoever reads a log knows that they belong to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsx.checkpoint.folders import Checkpoint
from dsx.errors import CheckpointError, DamagedCheckpointError


def nothing_usable(where: str, damaged: Sequence[str], way_on: str) -> CheckpointError:
    """`where`: what holds nothing usable, as a sentence without its end."""
    return CheckpointError("\n  ".join([f"{where}:", *damaged, way_on]))


def older(found: Checkpoint, damaged: Path, among: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those that are less far than `found` and don't hold what is damaged, newest first."""
    sound = (
        other
        for other in among
        if other.far < found.far
        and not damaged.is_relative_to(other.folder)
        and not damaged.is_relative_to(other.shared_folder)
    )
    return sorted(sound, key=lambda other: other.far, reverse=True)


@contextmanager
def advised(argument: str, others: Callable[[Path], Sequence[Checkpoint]]) -> Iterator[None]:
    """Names the way on in the error about a checkpoint whose damage shows when it is read.

    Args:
        argument: the command's, that takes a checkpoint.
        others: those to take instead of one that holds this damaged path, the best first.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        instead = next(iter(others(error.path)), None)
        way_on = (
            f"take another: {argument} {instead.folder}"
            if instead is not None
            else f"there is none to take instead; bring this one back from a copy, or give "
            f"{argument} a checkpoint from elsewhere"
        )
        raise DamagedCheckpointError(f"{error}\n  {way_on}", error.path) from error
