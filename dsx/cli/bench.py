"""`dsx bench NAME`: measurements, each a ratio to something run beside it."""

import argparse
import importlib
from typing import Any

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


class _BenchParser(argparse.ArgumentParser):
    """Learns its arguments from the bench's own module when its turn has come: what others import
    takes seconds, and has to wait in some until the environment is set."""

    def __init__(self, *, bench: str, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._bench = bench

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        module = importlib.import_module(f"dsx.bench.{self._bench}")
        module.add_arguments(self)
        self.set_defaults(bench_run=module.run, parser=self)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a bench."""
    benches = parser.add_subparsers(
        dest="bench", metavar="NAME", required=True, parser_class=_BenchParser
    )
    for name, summary in BENCHES.items():
        bench = benches.add_parser(name, bench=name, help=summary, description=summary)
        bench.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.bench_run(arguments))
