"""What `deepspeed --module dsx.train` starts on every rank: one cluster of a run.

`deepspeed --num_gpus 2 --module dsx.train --deepspeed_config F [--set KEY=VALUE ...]
[--cluster NAME --coordinator http://HOST:PORT]`. Without `--coordinator` it is a plain pipeline
run of one cluster.

SIGTERM or SIGINT lets it save at the next step's boundary and end with exit code 75.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dsx.cli.common import (
    add_secret_argument,
    add_settings_arguments,
    cluster_name,
    secret_file,
    settings_from,
)
from dsx.cli.main import explain_file_error
from dsx.errors import DsxError, SettingsError
from dsx.tracking.phases import announce


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of one rank."""
    return make_parser().parse_args(argv)


def make_parser() -> argparse.ArgumentParser:
    """The arguments of one rank. The `deepspeed` launcher looks at them, too, and stumbles over
    any that could be an abbreviation of its own.
    """
    parser = argparse.ArgumentParser(
        prog="dsx.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings_arguments(parser)
    parser.add_argument(
        "--cluster",
        type=cluster_name,
        default="c0",
        metavar="NAME",
        help="this cluster's name, another for each cluster of a run (default: c0)",
    )
    parser.add_argument(
        "--coordinator",
        metavar="URL",
        help="what `dsx coordinator` printed; without it this cluster trains alone",
    )
    parser.add_argument(
        "--address",
        metavar="HOST",
        help="this machine's address as other clusters reach it (default: the one from which the "
        "coordinator is reached)",
    )
    add_secret_argument(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|PATH|never",
        help="go on from the run folder's newest checkpoint if there is one (auto, the default), "
        "from a run folder or one checkpoint, or start afresh in an unused run folder (never)",
    )
    parser.add_argument(
        "--checked",
        action="store_true",
        help="started by `dsx local`, which has checked all that can be checked before",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    args = parse(argv)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s {args.cluster}/{rank} %(levelname)s %(message)s",
    )
    try:
        with ExitStack() as until_the_end:
            return _train(args, rank, until_the_end)
    except DsxError as error:
        print(f"dsx: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, SettingsError) else 1
    except OSError as error:
        told = explain_file_error(error)
        if told is None:
            raise
        print(f"dsx: DsxError: {told}", file=sys.stderr, flush=True)
        return 1


def _train(args: argparse.Namespace, rank: int, until_the_end: ExitStack) -> int:
    settings = settings_from(args)
    from dsx.exchange.address import read_coordinator
    from dsx.exchange.secret import RunSecret, require_secret

    path = secret_file(args)
    secret = RunSecret.read(path) if path is not None else None
    if args.coordinator is not None:
        require_secret(secret, read_coordinator(args.coordinator)[0], "--coordinator")
        require_secret(secret, args.address or "127.0.0.1", "--address")
    announce("loading libraries", rank)
    # Heavy imports come after settings and arguments are known to be good.
    from dsx.cluster.launcher import go_on_command
    from dsx.training.holding import held
    from dsx.training.meeting import CONNECT_SECONDS, wait_for
    from dsx.training.preflight import preflight
    from dsx.training.run import ClusterRun, Launch
    from dsx.training.stopping import EXIT_STOPPED

    if args.coordinator is not None and rank == 0:
        # Before hours may go into the preparation of data.
        wait_for(read_coordinator(args.coordinator), CONNECT_SECONDS, secret, args.cluster)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    announce("preparing data, checking the model", rank)
    ready = preflight(settings, processes, check_split=rank == 0 and not args.checked)
    if rank == 0:
        until_the_end.enter_context(held(settings.dsx.run_dir, args.cluster))
    launch = Launch(args.cluster, args.coordinator, args.address, args.resume, secret)
    announce("building the model", rank)
    run = ClusterRun(settings, launch, ready)
    # Whoever starts several clusters says itself how to go on with them.
    again = None
    if rank == 0 and not args.checked:
        hostfile = Path(settings.dsx.run_dir) / f"hostfile-{args.cluster}"
        again = go_on_command("dsx.train", sys.argv[1:], processes, hostfile)
        logging.getLogger(__name__).info("after an interruption, go on with: %s", again)
    if run.train():
        run.close()
        return 0
    run.abandon()
    if rank == 0:
        what = f"saved {run.saved}" if run.saved is not None else "nothing was trained yet"
        way_on = f". Go on with:\n  {again}" if again is not None else ""
        print(f"dsx: asked to end at step {run.step}; {what}{way_on}", file=sys.stderr, flush=True)
    # An exchange may still be in the air, for whose end no thread must be waited.
    os._exit(EXIT_STOPPED)


if __name__ == "__main__":
    sys.exit(main())
