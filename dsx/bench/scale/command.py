"""The arguments of `dsx bench scale`, and what it prints."""

import argparse
import os
from typing import Any

from rich.table import Table

from dsx.bench.printing import show, take_network_rights, tell
from dsx.bench.scale.settings import outer_settings, read_outer
from dsx.errors import SettingsError
from dsx.settings.units import read_count, read_rate
from dsx.tracking.text import bytes_text, seconds_text

_MOST = 250


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clusters", default="2,4,8,16,32,64", metavar="N,N", help="default: 2,4,8,16,32,64"
    )
    parser.add_argument(
        "--parameters", default="2m", metavar="2m", help="of the made-up model (default: 2m)"
    )
    parser.add_argument(
        "--rate",
        default="2mbit",
        metavar="2mbit",
        help="of each cluster's line, in each direction (default: 2mbit); none does not shape",
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured (default: 3)")
    parser.add_argument(
        "--outer",
        type=read_outer,
        default={},
        metavar="JSON",
        help="keys of dsx.outer other than the defaults, as "
        """'{"compression": {"matrices": "int4"}}'""",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        DsxError: as `run_scale_bench`.
    """
    counts = [int(word) if word.isdecimal() else 0 for word in arguments.clusters.split(",")]
    if not all(2 <= count <= _MOST for count in counts):
        raise SettingsError(f"--clusters {arguments.clusters}: give numbers from 2 to {_MOST}")
    rate = None if arguments.rate == "none" else read_rate(arguments.rate, "--rate")
    for count in counts:
        outer_settings(arguments.outer, count)
    take_network_rights()
    # Before torch is imported; it warns of each connection that no address there has a name.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dsx.bench.scale.bench import ScaleBench, run_scale_bench

    parameters = round(read_count(arguments.parameters, "--parameters"))
    bench = ScaleBench(counts, parameters, rate, arguments.rounds, arguments.outer)
    result = run_scale_bench(bench, tell)
    show(arguments, result, _table(result["rows"]), width=140)
    return 0


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        *("clusters", "an exchange", "sent", "most sent", "received", "most received"),
        *("own memory", "with shared pages", "same weights"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["clusters"]),
            seconds_text(row["exchange_seconds"]),
            *(
                bytes_text(row[f"{name}_bytes"])
                for name in ("sent", "most_sent", "received", "most_received")
            ),
            bytes_text(row["private_bytes"]),
            bytes_text(row["proportional_bytes"]),
            "yes" if row["digests_equal"] else "NO",
        )
    return table
