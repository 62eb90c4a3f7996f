"""`dsx local`: several clusters on this machine, started through the `deepspeed` command."""

import argparse
import shlex
import signal
import sys
import time

from dsx.cli.common import (
    add_secret_argument,
    add_settings_arguments,
    count,
    secret_file,
    settings_arguments,
    settings_from,
)
from dsx.errors import LaunchError, SettingsError
from dsx.settings import Implied, Settings

HELP = "Start several clusters on this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_settings_arguments(parser)
    parser.add_argument(
        "--clusters", type=count, default=2, metavar="N", help="clusters (default: 2)"
    )
    parser.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="N",
        help="data-parallel replicas of each pipeline stage inside a cluster (default: 1)",
    )
    add_secret_argument(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|PATH|never",
        help="go on from the run folder's newest checkpoint if there is one (auto, the default), "
        "from a run folder or one checkpoint, or start afresh in an unused run folder (never)",
    )


def run(args: argparse.Namespace) -> int:
    """Train; prints a summary at the end.

    Returns 0; 75 when it was asked to end and all clusters have saved their state; 128 + the
    signal when they could not.

    Raises:
        SettingsError: the settings are wrong; nothing was started.
        LaunchError: a cluster failed, and the others were ended; or the secret can't be used.
    """
    from dsx.exchange.secret import RunSecret

    # Every cluster waits for all others before its first step.
    start = Implied(f"dsx.outer.start_clusters={args.clusters}", f"--clusters {args.clusters}")
    settings = settings_from(args, [start])
    _require_enough(settings, args.clusters)
    path = secret_file(args)
    secret = RunSecret.read(path) if path is not None else None
    processes = settings.dsx.pipeline.stages * args.replicas

    # Whatever can be refused is refused here, before any process is started.
    from dsx.training.preflight import preflight

    preflight(settings, processes)

    from dsx.checkpoint.choosing import choose, finished, saved_since
    from dsx.cluster.launch import cluster_names, plan_launches, visible_gpus
    from dsx.cluster.supervise import Stopped, run_clusters
    from dsx.exchange.coordinator import Coordinator
    from dsx.tracking.progress import RunProgress, log_path
    from dsx.tracking.summary_table import print_summary
    from dsx.training.holding import held
    from dsx.training.stopping import EXIT_STOPPED

    run_dir = settings.dsx.run_dir
    names = cluster_names(args.clusters)
    steps = settings.dsx.training.steps
    if args.resume == "auto" and all(finished(run_dir, name, steps) for name in names):
        print(
            f"this run has finished: {run_dir} holds checkpoints of all {steps} steps; raise "
            "dsx.training.steps to go on, or choose another dsx.run_dir"
        )
        print_summary(run_dir)
        return 0
    for name in names:
        if args.resume not in ("auto", "never"):
            choose(run_dir, name, args.resume)  # each cluster does it again; here to refuse early
        with held(run_dir, name):  # each cluster's rank 0 takes it again
            pass
    given = ["--secret-file", path] if path is not None else []
    with Coordinator("127.0.0.1:0", secret) as coordinator:
        launches = plan_launches(
            [*settings_arguments(args, [start]), "--checked", "--resume", args.resume, *given],
            args.clusters,
            processes,
            coordinator.address,
            lambda cluster: log_path(run_dir, cluster),
            gpus=visible_gpus(),
        )
        print(f"run folder: {run_dir} (logs in {log_path(run_dir, names[0]).parent})", flush=True)
        started = time.time()
        try:
            with RunProgress(run_dir, names, settings.dsx.training.steps) as progress:
                run_clusters(launches, progress)
        except LaunchError as error:
            if not all(saved_since(run_dir, name, started) for name in names):
                raise
            raise LaunchError(
                f"{error}\ndsx: to go on from the last save:\n  {_again()}"
            ) from error
        except Stopped as stopped:
            print(f"dsx: ended by {stopped}; no process is left", file=sys.stderr)
            unsaved = [n for n in names if not saved_since(run_dir, n, stopped.time)]
            if unsaved:
                # Without a save of its own, the run has to begin where this launch did.
                anything = any(saved_since(run_dir, name, started) for name in names)
                started_from = "auto" if anything else args.resume
                print(
                    f"dsx: {', '.join(unsaved)} had not saved by then: what was trained since the "
                    f"last checkpoint is lost; go on with:\n  {_again(started_from)}",
                    file=sys.stderr,
                )
                return 128 + signal.Signals(stopped.number)
            print(f"dsx: all have saved their state; go on with:\n  {_again()}", file=sys.stderr)
            return EXIT_STOPPED
    print_summary(run_dir)
    return 0


def _require_enough(settings: Settings, clusters: int) -> None:
    """Refuse to wait for clusters that can't come: the coordinator is this command's own."""
    wanted = settings.dsx.outer.start_clusters
    if wanted > clusters:
        raise SettingsError(
            f"dsx.outer.start_clusters is {wanted}, but --clusters is {clusters}, and no other "
            f"cluster can join those of `dsx local`; start {wanted}, or set it to {clusters}"
        )


def _again(resume: str = "auto") -> str:
    """The command line of this process, with such a `--resume` in the place of its own."""
    from dsx.cluster.launcher import without_resume

    chosen = [] if resume == "auto" else ["--resume", resume]
    return shlex.join(["dsx", *without_resume(sys.argv[1:]), *chosen])
