"""`dsx audit`: what came of every token of a run."""

import argparse
import json

from dsx.cli.common import add_runs_argument

HELP = "Account for every token that a run has trained."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs_argument(parser, "several, where the clusters have one each")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0; 1 when tokens were passed over or trained twice, or the ledgers disagree."""
    from dsx.tracking.audit import audit, table
    from dsx.tracking.ledger import read_ledgers
    from dsx.training.kept import kept_by_stopped

    ledgers = read_ledgers(args.runs)
    result = audit(ledgers, kept_by_stopped(args.runs, ledgers))
    if args.json:
        print(json.dumps(result.as_json(), indent=1))
    else:
        print("\n".join(table(result)))
    return 0 if result.is_clean else 1
