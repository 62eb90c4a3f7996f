"""`dsx doctor`: what of this machine and this set-up a run would stumble over."""

import argparse
import json

from dsx.cli.common import add_secret_argument, secret_file
from dsx.errors import DsxError
from dsx.settings import load_settings

HELP = "Check this machine and a run's set-up."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--deepspeed_config", metavar="FILE", help="also check these settings and what they name"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="override settings, as in dsx.outer.local_steps=10",
    )
    parser.add_argument(
        "--coordinator", metavar="URL", help="also see whether this coordinator lets a cluster in"
    )
    parser.add_argument(
        "--cluster", default="c0", metavar="NAME", help="as which one (default: c0)"
    )
    add_secret_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 when something is wrong."""
    from dsx.training.doctor import Row, examine

    rows = []
    settings = None
    if args.deepspeed_config is not None:
        try:
            settings = load_settings(args.deepspeed_config, args.overrides)
        except DsxError as error:
            rows.append(Row("settings", str(error), True, "correct the file, or the --set"))
    rows += examine(settings, secret_file(args), args.coordinator, args.cluster)
    if args.json:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=2))
    else:
        _print(rows)
    return int(any(row.wrong for row in rows))


def _print(rows: list) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("", "check", "found", "what to do"):
        table.add_column(heading)
    for row in rows:
        sign = Text("wrong", "bold red") if row.wrong else Text("ok", "green")
        table.add_row(sign, Text(row.check), Text(row.found), Text(row.fix))
    Console().print(table)
