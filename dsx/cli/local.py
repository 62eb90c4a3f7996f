"""`dsx local`: several clusters on this machine, started through the `deepspeed` command."""

import argparse
import signal
import sys

from dsx.cli.common import add_settings_arguments, settings_arguments, settings_from

HELP = "Start several clusters on this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_settings_arguments(parser)
    parser.add_argument(
        "--clusters", type=_positive, default=2, metavar="N", help="clusters (default: 2)"
    )
    parser.add_argument(
        "--replicas",
        type=_positive,
        default=1,
        metavar="N",
        help="data-parallel replicas of each pipeline stage inside a cluster (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Train; prints a summary at the end. Returns 0, or 128 + the signal that ended it.

    Raises:
        SettingsError: the settings are wrong; nothing was started.
        LaunchError: a cluster failed; the others were ended.
    """
    # Every cluster waits for all others before its first step. The user's overrides come later
    # and win.
    args.overrides = [f"dsx.outer.start_clusters={args.clusters}", *args.overrides]
    settings = settings_from(args)
    processes = settings.dsx.pipeline.stages * args.replicas

    # Whatever can be refused is refused here, before any process is started.
    from dsx.training.preflight import preflight

    preflight(settings, processes)

    from dsx.cluster.launch import cluster_names, plan_launches, visible_gpus
    from dsx.cluster.supervise import Stopped, run_clusters
    from dsx.exchange.coordinator import Coordinator
    from dsx.tracking.progress import RunProgress, log_path
    from dsx.tracking.summary_table import print_summary

    run_dir = settings.dsx.run_dir
    with Coordinator("127.0.0.1:0", settings.dsx.outer.timeout_seconds) as coordinator:
        launches = plan_launches(
            [*settings_arguments(args), "--checked"],
            args.clusters,
            processes,
            coordinator.address,
            lambda cluster: log_path(run_dir, cluster),
            gpus=visible_gpus(),
        )
        names = cluster_names(args.clusters)
        print(f"run folder: {run_dir} (logs in {log_path(run_dir, names[0]).parent})", flush=True)
        try:
            with RunProgress(run_dir, names, settings.dsx.training.steps) as progress:
                run_clusters(launches, progress)
        except Stopped as stopped:
            print(f"dsx: ended by {stopped}; no process is left", file=sys.stderr)
            return 128 + signal.Signals(stopped.number)
    print_summary(run_dir)
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}; give 1 or more")
    return value
