"""Run several clusters on this machine as one: they end together."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from dsx.cluster.failure import explain_exit, first_error, is_consequence
from dsx.cluster.launch import ClusterLaunch
from dsx.cluster.processes import ProcessTree, end_all
from dsx.errors import LaunchError

GRACE_SECONDS = 20.0
"""Between the request to end and the end by force, beside the inner steps; a checkpoint is written
in this time."""
GRACE_STEPS = 3
"""By so many times the slowest inner step of late the grace is longer: the ranks agree to end while
the step after the request is made, and one may take longer than those before."""
LONGEST_GRACE_SECONDS = 600.0
"""However long the steps are."""
CAUSE_SECONDS = 2.0
"""How long the cause of an error that came from another cluster may stay behind it: DeepSpeed's
launcher looks after its ranks once a second."""
_TICK_SECONDS = 0.1


class Display(Protocol):
    """What shows the clusters to a person."""

    def update(self) -> None: ...

    def set_phase(self, cluster: str, phase: str) -> None: ...

    def tell(self, text: str) -> None: ...

    def slowest_step(self) -> float:
        """Seconds from step to step, of the slowest that clusters made of late; 0: none known."""
        ...


class Stopped(Exception):
    """The process was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.time = time.time()
        """When the clusters were asked to end."""


def run_clusters(
    launches: Sequence[ClusterLaunch], display: Display, grace_seconds: float = GRACE_SECONDS
) -> None:
    """Start all clusters and wait until all have succeeded.

    None of their processes is left when this returns or raises, whatever happened.

    Args:
        grace_seconds: for a checkpoint, after a request to end; inner steps come on top, as long as
            they were measured.

    Raises:
        LaunchError: a cluster failed, with the first error; the others were ended.
        Stopped: SIGINT, SIGTERM or SIGHUP came; all were ended.
    """
    with _stop_signals() as stops:
        trees: list[ProcessTree] = []
        try:
            for launch in launches:
                trees.append(_start(launch))
            _wait(launches, trees, display, stops)
        finally:
            for launch, tree in zip(launches, trees, strict=False):
                if not tree.is_gone():
                    display.set_phase(launch.cluster, "ending")
            display.update()
            grace = min(LONGEST_GRACE_SECONDS, grace_seconds + GRACE_STEPS * display.slowest_step())
            if stops:
                display.tell(
                    "asked to end: every cluster finishes its inner step and saves; what has not "
                    f"ended after {grace:.0f} s is killed, and a second signal does so at once"
                )
            # A second signal asks for the end at once.
            at_first = len(stops)
            end_all(trees, grace, lambda: len(stops) > max(at_first, 1))


def _start(launch: ClusterLaunch) -> ProcessTree:
    try:
        return ProcessTree(launch.command, launch.environment, launch.log)
    except OSError as error:
        raise LaunchError(
            f"cluster {launch.cluster} could not be started: {launch.command[0]}: {error}"
        ) from error


def _wait(
    launches: Sequence[ClusterLaunch],
    trees: Sequence[ProcessTree],
    display: Display,
    stops: list[int],
) -> None:
    running = dict(enumerate(trees))
    while running:
        if stops:
            raise Stopped(stops[0])
        failed = _settle(launches, running, display)
        if failed:
            raise _failure(launches, trees, running, failed, display)
        display.update()
        time.sleep(_TICK_SECONDS)


def _settle(
    launches: Sequence[ClusterLaunch], running: dict[int, ProcessTree], display: Display
) -> dict[int, int]:
    """Take the clusters that have ended out of `running`; exit codes of the failed ones."""
    failed: dict[int, int] = {}
    for index, tree in list(running.items()):
        code = tree.exit_code()
        if code is None:
            continue
        del running[index]
        display.set_phase(launches[index].cluster, "failed" if code else "finished")
        if code:
            failed[index] = code
    return failed


def _failure(
    launches: Sequence[ClusterLaunch],
    trees: Sequence[ProcessTree],
    running: dict[int, ProcessTree],
    failed: dict[int, int],
    display: Display,
) -> LaunchError:
    deadline = time.monotonic() + CAUSE_SECONDS
    while True:
        errors = {
            index: first_error(launches[index].log, trees[index].log_start) for index in failed
        }
        causes = [index for index in failed if not is_consequence(errors[index])]
        if causes or not running or time.monotonic() >= deadline:
            break
        time.sleep(_TICK_SECONDS)
        failed |= _settle(launches, running, display)
    first = (causes or list(failed))[0]
    launch = launches[first]
    return LaunchError(
        f"cluster {launch.cluster} failed with {explain_exit(failed[first])}: {errors[first]}\n"
        f"(the whole log: {launch.log})"
    )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that came and ask for the end. They interrupt nothing; look at the list."""
    stops: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        stops.append(number)

    if threading.current_thread() is not threading.main_thread():
        # Python lets only the main thread handle signals; whoever runs this handles them.
        yield stops
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
