"""`dsx doctor`: what of this machine and this set-up a run would stumble over."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsx.cli.common import (
    add_secret_argument,
    add_settings_arguments,
    secret_file,
    settings_from,
)
from dsx.errors import DsxError, SettingsError

if TYPE_CHECKING:
    from dsx.training.doctor import Row

HELP = "Check this machine and a run's set-up."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_settings_arguments(parser, required=False)
    parser.add_argument(
        "--coordinator", metavar="URL", help="also see whether this coordinator lets a cluster in"
    )
    parser.add_argument(
        "--cluster", default="c0", metavar="NAME", help="as which one (default: c0)"
    )
    add_secret_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 2 when settings or arguments are wrong, 1 when anything else is."""
    from dsx.training.doctor import Row, examine

    if args.overrides and args.deepspeed_config is None:
        raise SettingsError(
            f"--set {args.overrides[0]} changes a settings file; give one with --deepspeed_config"
        )
    rows = []
    settings = None
    if args.deepspeed_config is not None:
        try:
            settings = settings_from(args)
        except DsxError as error:
            rows.append(Row.of_error("settings", error, "correct the file, or the --set"))
    rows += examine(settings, secret_file(args), args.coordinator, args.cluster)
    if args.json:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}, indent=2))
    else:
        _print(rows)
    if any(row.unusable for row in rows):
        return 2
    return int(any(row.wrong for row in rows))


def _print(rows: "Sequence[Row]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column(no_wrap=True)
    for heading in ("check", "found", "what to do"):
        # A name or a path that is longer than its column goes on in the next line.
        table.add_column(heading, overflow="fold")
    for row in rows:
        sign = Text("wrong", "bold red") if row.wrong else Text("ok", "green")
        table.add_row(sign, Text(row.check), Text(row.found), Text(row.fix))
    Console().print(table)
