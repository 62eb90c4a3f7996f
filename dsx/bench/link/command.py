"""The arguments of `dsx bench link`, and what it prints."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dsx.bench.link.bench import LinkBench, run_link_bench
from dsx.bench.link.methods import METHODS, TORCHFT
from dsx.bench.printing import show, take_network_rights, tell
from dsx.cluster.supervise import Stopped
from dsx.errors import SettingsError
from dsx.settings.units import read_rate
from dsx.tracking.text import bytes_text, number_text, seconds_text

QUICKSTART = "configs/quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rate = add_common_arguments(parser)
    rate.add_argument(
        "--match-paper",
        action="store_true",
        help="the rate at which all-reduce communicates 390 s per second of computing, as in the "
        "DiLoCoX paper; there 357 times the throughput was reached, 391 can be",
    )
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        metavar="NAME,NAME",
        help=f"which of {', '.join((*METHODS, TORCHFT))} (default: all but the last), in this "
        "order; `none`, which comes first, may be given again to see what else the machine did",
    )


def add_common_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """What `dsx bench link` and `dsx bench peers` share; the group that holds the rate."""
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--clusters", type=int, default=2, metavar="N")
    rate = parser.add_mutually_exclusive_group(required=True)
    rate.add_argument("--rate", metavar="2mbit", help="of each cluster's line, in each direction")
    parser.add_argument(
        "--diloco-steps",
        type=int,
        default=125,
        metavar="H",
        help="inner steps of a round of the diloco methods (default: 125)",
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of everything")
    parser.add_argument(
        "--speed-only",
        action="store_true",
        help="leave out the runs that only find the loss of all-reduce and DiLoCo at equal tokens",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="keep the runs there (default: in none)"
    )
    return rate


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        DsxError: as `run_link_bench`.
    """
    return compare(arguments, arguments.methods.split(","))


def compare(
    arguments: argparse.Namespace, methods: Sequence[str], overrides: Sequence[str] = ()
) -> int:
    """As `run`, for these methods, with `overrides` before the arguments' own."""
    if arguments.clusters < 2:
        raise SettingsError(f"--clusters is {arguments.clusters}; a link joins two or more")
    bench = LinkBench(
        arguments.deepspeed_config,
        [*overrides, *arguments.overrides],
        arguments.clusters,
        read_rate(arguments.rate, "--rate") if arguments.rate is not None else None,
        methods,
        arguments.diloco_steps,
        arguments.repeats,
        not arguments.speed_only,
        arguments.output,
    )
    take_network_rights()
    try:
        result = run_link_bench(bench, tell)
    except Stopped as stopped:
        print(f"dsx: ended by {stopped}; no process is left", file=sys.stderr)
        return 128 + stopped.number
    show(arguments, result, _table(result["rows"]), width=200)
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    for name in (
        *("link", "tokens/s", "utilization", "x all-reduce", "sent per token", "a step", "H"),
        *("delay", "an exchange", "stood still", "loss", "largest rank"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        rate, over = row["rate"], row["over_allreduce"]
        table.add_row(
            row["method"],
            "free" if rate is None else f"{rate / 1e6:.3f} Mbit/s",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['utilization']:.4f}",
            "-" if over is None else f"{over:,.1f}",
            f"{row['sent_bytes_per_token']:,.1f} B",
            seconds_text(row["step_seconds"]),
            "-" if row["local_steps"] is None else str(row["local_steps"]),
            "-" if row["delay"] is None else str(row["delay"]),
            seconds_text(row["exchange_seconds"]),
            seconds_text(row["blocked_seconds"]),
            number_text(row["loss"]),
            bytes_text(max(row["peak_rank_bytes"].values(), default=None)),
        )
    return table
