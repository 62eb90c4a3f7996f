"""`dsx mesh init`: an encrypted network for the machines of a run."""

import argparse

from dsx.cli.common import output_folder

HELP = "Write WireGuard configurations that join the machines of a run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "Write a folder for every machine: WireGuard configuration, run secret, commands."
    init = actions.add_parser("init", help="write them", description=summary, allow_abbrev=False)
    init.set_defaults(parser=init)
    init.add_argument(
        "--clusters",
        nargs="+",
        required=True,
        metavar="NAME=HOST:PORT",
        help="each cluster's name, and where WireGuard is reached on it (UDP); for a cluster of "
        "several machines NAME=HOST:PORT,HOST:PORT, that of rank 0 first",
    )
    init.add_argument(
        "--output",
        required=True,
        type=output_folder,
        metavar="DIR",
        help="a new folder, or an empty one",
    )
    init.add_argument(
        "--network",
        default="10.83.0.0/24",
        metavar="NETWORK",
        help="the private network whose addresses the machines get (default: 10.83.0.0/24)",
    )
    init.add_argument(
        "--coordinator",
        metavar="NAME",
        help="the cluster beside which the coordinator runs (default: the first)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the folders, and say what to do with them. Raises SettingsError and LaunchError."""
    from dsx.exchange.mesh import COMMANDS, parse_clusters, write_mesh

    machines = parse_clusters(args.clusters)
    coordinator = args.coordinator or machines[0].cluster
    for machine, folder in zip(
        machines, write_mesh(machines, args.network, coordinator, args.output), strict=True
    ):
        print(f"{folder}  for the machine at {machine.host}; what to type there: {COMMANDS}")
    print(
        "These folders hold keys. Move each to its machine by a way that nobody else can read, and "
        "keep none here."
    )
    return 0
