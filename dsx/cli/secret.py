"""`dsx secret new FILE`: the run secret, by which clusters know each other."""

import argparse

from dsx.cli.common import output_file

HELP = "Make the secret that the clusters of a run know each other by."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="write a new one",
        description="Write a new run secret.",
        allow_abbrev=False,
    )
    new.set_defaults(parser=new)
    new.add_argument(
        "file",
        metavar="FILE",
        type=output_file,
        help="a new file, which only its owner can read",
    )


def run(args: argparse.Namespace) -> int:
    """Write the file. Raises LaunchError when it is there already or can't be written."""
    from dsx.exchange.secret import RunSecret

    RunSecret.create(args.file)
    print(
        f"a new run secret is in {args.file}; copy it to every machine of the run, by a way that "
        "nobody else can read, and name it there: --secret-file FILE"
    )
    return 0
