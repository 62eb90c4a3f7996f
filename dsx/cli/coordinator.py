"""`dsx coordinator`: the meeting point of the clusters, until it is told to stop."""

import argparse
import logging
import signal
import threading

from dsx.cli.common import add_secret_argument, secret_file

HELP = "Run the meeting point of the clusters until Ctrl-C or SIGTERM."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--bind",
        required=True,
        metavar="HOST:PORT",
        help="address to listen on, as the clusters reach it; port 0 takes a free one. Any "
        "other than a loopback address needs a run secret",
    )
    add_secret_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the address and serve.

    Raises:
        LaunchError: the address or the run secret can't be used.
    """
    from dsx.exchange.coordinator import Coordinator
    from dsx.exchange.secret import RunSecret

    logging.basicConfig(format="%(asctime)s coordinator %(levelname)s %(message)s")
    path = secret_file(args)
    secret = RunSecret.read(path) if path is not None else None
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with Coordinator(args.bind, secret) as coordinator:
        print(
            f"coordinator at {coordinator.address} (give this to every cluster as --coordinator; "
            "Ctrl-C ends it)",
            flush=True,
        )
        stopped.wait()
    return 0
