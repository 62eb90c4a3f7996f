"""Starts the clusters of `dsx bench scale`, and reads what they and the link tell."""

import contextlib
import gc
import multiprocessing
import secrets
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import psutil

from dsx.bench.machine import this_machine
from dsx.bench.namespaces import SlowLink
from dsx.bench.scale.cluster import ScaleCluster, run_cluster
from dsx.bench.scale.settings import outer_settings
from dsx.errors import LaunchError
from dsx.exchange.coordinator import Coordinator
from dsx.exchange.secret import KEY_BYTES, RunSecret
from dsx.tracking.text import bytes_text, seconds_text

COORDINATOR_PORT = 29510
_CONNECT_SECONDS = 600.0


@dataclass(frozen=True)
class ScaleBench:
    """What is measured.

    Args:
        clusters: how many, one measurement after the other.
        parameters: of the model, about.
        rate: of each cluster's line, bits per second and direction; None does not shape.
        rounds: measured, after one that is not.
        outer: keys of `dsx.outer` that are not the defaults; round and delay are set here.
    """

    clusters: Sequence[int]
    parameters: int = 2_000_000
    rate: float | None = 2e6
    rounds: int = 3
    outer: Mapping[str, Any] = field(default_factory=dict)


def run_scale_bench(bench: ScaleBench, tell: Callable[[str], None] = lambda text: None) -> Any:
    """Measure; one row per number of clusters.

    Returns:
        `rows`, each with `clusters`; `exchange_seconds`, median over rounds of the slowest cluster;
        `sent_bytes`, `received_bytes`: of a round by the interfaces, mean over the clusters, and
        `most_sent_bytes`, `most_received_bytes`; `private_bytes`, `proportional_bytes`: memory of
        a process, largest; `digests_equal`. Further `parameters`, `rate` and `machine`.

    Raises:
        LaunchError: a cluster ended early, or the link can't be made.
    """
    rows = []
    for clusters in bench.clusters:
        tell(f"{clusters} clusters")
        row = _measure(bench, clusters)
        # Now, as a later number of clusters may be one too many for this machine.
        tell(
            f"  an exchange took {seconds_text(row['exchange_seconds'])}, "
            f"{bytes_text(row['sent_bytes'])} sent by each"
        )
        rows.append(row)
    return {
        "rows": rows,
        "parameters": bench.parameters,
        "rate": bench.rate,
        "machine": this_machine(),
    }


def _measure(bench: ScaleBench, clusters: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    settings = outer_settings(bench.outer, clusters)
    # What was imported is shared by all clusters; a collection would write to its pages.
    gc.freeze()
    # Between clusters that are not on loopback addresses, nothing goes without one.
    secret = RunSecret(secrets.token_bytes(KEY_BYTES))
    with SlowLink(clusters) as link:
        url = f"http://{link.hub_address}:{COORDINATOR_PORT}"
        serving, served = context.Pipe()
        server = context.Process(target=_coordinate, args=(link, served, secret), daemon=True)
        server.start()
        started: list[tuple[ForkProcess, Connection]] = []
        try:
            serving.recv()
            for index in range(clusters):
                task = ScaleCluster(index, clusters, bench.parameters, settings, url, secret)
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_cluster, args=(task, link, theirs), daemon=True
                )
                process.start()
                theirs.close()
                started.append((process, ours))
            hear(started)
            # Making the connections takes traffic of its own, which grows with their number.
            link.shape(bench.rate)
            _round(started)
            rounds = []
            for _ in range(bench.rounds):
                before = link.counted()
                told = _round(started)
                rounds.append((before, told, link.counted()))
        finally:
            # A cluster that outlives its coordinator says that it misses it.
            _end([process for process, _ in started])
            _end([server])
    sent = [[b.sent - a.sent for a, b in zip(x, y, strict=True)] for x, _, y in rounds]
    received = [[b.received - a.received for a, b in zip(x, y, strict=True)] for x, _, y in rounds]
    told = [answer for _, answers, _ in rounds for answer in answers]
    if any(answer["participants"] != clusters for answer in told):
        raise LaunchError(f"not all of {clusters} clusters took part in every round")
    return {
        "clusters": clusters,
        "exchange_seconds": statistics.median(
            max(answer["exchange_seconds"] for answer in answers) for _, answers, _ in rounds
        ),
        "sent_bytes": statistics.median(map(statistics.mean, sent)),
        "received_bytes": statistics.median(map(statistics.mean, received)),
        "most_sent_bytes": statistics.median(map(max, sent)),
        "most_received_bytes": statistics.median(map(max, received)),
        "private_bytes": max(answer["memory"]["private"] for answer in told),
        "proportional_bytes": max(answer["memory"]["proportional"] for answer in told),
        "digests_equal": all(len({a["digest"] for a in answers}) == 1 for _, answers, _ in rounds),
    }


def _end(processes: Sequence[ForkProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _coordinate(link: SlowLink, pipe: Connection, secret: RunSecret) -> None:
    link.enter(None)
    bind = f"{link.hub_address}:{COORDINATOR_PORT}"
    with Coordinator(bind, secret=secret):
        pipe.send("serving")
        pipe.recv()


def _round(started: Sequence[tuple[ForkProcess, Connection]]) -> list[Any]:
    for _, pipe in started:
        with contextlib.suppress(BrokenPipeError):  # `hear` tells why one has ended
            pipe.send("go")
    return hear(started)


def hear(started: Sequence[tuple[ForkProcess, Connection]]) -> list[Any]:
    """One message from each cluster, in their order.

    Raises:
        LaunchError: one has ended, or none says anything for ten minutes.
    """
    pipes = [pipe for _, pipe in started]
    heard: dict[Any, Any] = {}
    while len(heard) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in heard], timeout=_CONNECT_SECONDS)
        if not ready:
            raise LaunchError(
                f"{len(pipes) - len(heard)} of {len(pipes)} clusters said nothing for "
                f"{_CONNECT_SECONDS:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                heard[pipe] = pipe.recv()
            except EOFError:
                index = pipes.index(pipe)
                raise LaunchError(_ended(started[index][0], index, len(pipes))) from None
    return [heard[pipe] for pipe in pipes]


def _ended(process: ForkProcess, index: int, clusters: int) -> str:
    """Why a cluster that should be there is not."""
    process.join()
    name = f"cluster {index} of {clusters}"
    if process.exitcode == -signal.SIGKILL:
        total = bytes_text(psutil.virtual_memory().total)
        return (
            f"{name} was killed, as the system does where memory ends; this machine has {total}: "
            "give fewer --clusters or --parameters"
        )
    return f"{name} has ended with exit code {process.exitcode}; its error is above"
