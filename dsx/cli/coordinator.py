"""`dsx coordinator`: the meeting point of the clusters, until it is told to stop."""

import argparse
import signal
import threading

from dsx.cli.common import seconds

HELP = "Run the meeting point of the clusters until Ctrl-C or SIGTERM."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--bind",
        required=True,
        metavar="HOST:PORT",
        help="address to listen on, as the clusters reach it; port 0 takes a free one. Nothing is "
        "encrypted or authenticated: use an address that only the clusters reach",
    )
    parser.add_argument(
        "--straggler-seconds",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a round waits for clusters that are alive but not ready (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the address and serve.

    Raises:
        LaunchError: the address can't be used.
    """
    from dsx.exchange.coordinator import Coordinator

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with Coordinator(args.bind, args.straggler_seconds) as coordinator:
        print(
            f"coordinator at {coordinator.address} (give this to every cluster as --coordinator; "
            "Ctrl-C ends it)",
            flush=True,
        )
        stopped.wait()
    return 0
