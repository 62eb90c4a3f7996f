"""What the benches of a slow link share: the rights to make one, and how they tell and print."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dsx.bench.namespaces import network_rights


def take_network_rights() -> None:
    """Go on with the rights to make network namespaces: where this process has none, the same
    command again by another that has."""
    rights = network_rights()
    if rights:
        os.execvp(rights[0], [*rights, sys.executable, "-m", "dsx.cli.main", *sys.argv[1:]])


def tell(text: str) -> None:
    """What a bench is about to do, beside its result."""
    print(text, file=sys.stderr, flush=True)


def show(
    arguments: argparse.Namespace, result: Mapping[str, Any], table: Table, width: int
) -> None:
    """The result, as JSON or as a table, as the arguments have it."""
    if arguments.json:
        print(json.dumps(result))
    else:
        Console(width=width).print(table)
