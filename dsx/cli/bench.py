"""`dsx bench NAME`: measurements, each a ratio to something run beside it."""

import argparse
import importlib

HELP = "Measure this machine and this installation."

BENCHES = {
    "overhead": "Tokens per second against a bare DeepSpeed script on the same model and data.",
    "codec": "Speed of every codec against an in-place copy.",
    "secret": "What it costs to authenticate a message, against sending and copying it.",
    "checkpoint": "What a checkpoint costs, against an inner step and a plain file copy.",
    "link": "Tokens per second over a slow link, against the same clusters without an exchange.",
    "peers": "torchft's own DiLoCo beside dsx: the same model, data, rounds and slow link.",
    "scale": "Exchange time, bytes and memory as the number of clusters grows.",
    "resume": "Runs that are stopped and brought back, against runs that never stopped.",
    "chaos": "A run that is broken again and again, and what comes of it.",
}
"""Name -> the one line that tells what `dsx.bench.NAME` measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a bench; the module behind it is imported when its turn has come."""
    benches = parser.add_subparsers(dest="bench", metavar="NAME", required=True)
    for name, summary in BENCHES.items():
        bench = benches.add_parser(name, help=summary, description=summary)
        bench.add_argument("--json", action="store_true", help="print JSON instead of a table")
        module = importlib.import_module(f"dsx.bench.{name}")
        module.add_arguments(bench)
        bench.set_defaults(bench_run=module.run)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.bench_run(arguments))
