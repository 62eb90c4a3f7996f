"""`dsx bench checkpoint`: what a checkpoint costs, beside an inner step and a plain file copy."""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsx.bench.ranks import run_bench_ranks
from dsx.settings import load_settings

QUICKSTART = "configs/quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--saves", type=int, default=5, help="measurements; the median counts")
    parser.add_argument(
        "--folder", metavar="DIR", help="on the disk to measure (default: a temporary folder)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    result = run_checkpoint_bench(
        arguments.deepspeed_config, arguments.overrides, arguments.saves, arguments.folder
    )
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"an inner step                {result['step_seconds']:8.3f} s")
    print(
        f"training stands still        {result['blocked_seconds']:8.3f} s "
        f"({result['blocked_steps']:.2f} steps)"
    )
    print(f"until it is complete         {result['write_seconds']:8.3f} s")
    print(f"bytes                        {result['bytes']:12,d}")
    print(f"  over the minimum           {result['bytes_over_minimum']:8.4f}")
    print(f"write rate                   {result['write_rate'] / 1e6:8.1f} MB/s")
    print(
        f"  over that of a plain copy  {result['rate_over_copy']:8.3f} "
        f"({result['copy_rate'] / 1e6:.1f} MB/s)"
    )
    return 0


def run_checkpoint_bench(
    deepspeed_config: str | Path,
    overrides: Sequence[str] = (),
    saves: int = 5,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """Save a cluster in training (with an outer engine, alone) several times.

    Args:
        saves: measurements, of which medians count.
        folder: where the run folder is made for the time of the measurement.

    Returns:
        `step_seconds`: of an inner step while nothing is written;
        `blocked_seconds`, `blocked_steps`: for which training stood still, and that in steps;
        `write_seconds`: from there to the complete checkpoint, while training goes on;
        `idle_write_seconds`: the same while training waits; `write_rate` is from this one;
        `copy_rate`: bytes/s of a copy of the same files to the same disk, brought to the disk;
        `rate_over_copy`: their ratio;
        `bytes`, `bytes_over_minimum`: of one checkpoint, and that over fp32 weights, moments,
        shared weights and outer momentum.

    Raises:
        SettingsError: the settings are wrong.
        LaunchError: the ranks could not be started, or failed.
    """
    from dsx.exchange.coordinator import Coordinator

    settings = load_settings(deepspeed_config, overrides)
    with (
        tempfile.TemporaryDirectory(prefix="dsx-bench-", dir=folder) as run_dir,
        Coordinator("127.0.0.1:0") as coordinator,
    ):
        request = {
            "settings": settings.model_dump(mode="json", exclude_none=True),
            "saves": saves,
            "run_dir": run_dir,
            "coordinator": coordinator.address,
        }
        ranks = settings.dsx.pipeline.stages
        measured = run_bench_ranks("dsx.bench.checkpoint_rank", ranks, request)
    median = {name: statistics.median(values) for name, values in measured.items()}
    write_rate = median["bytes"] / median["idle_write_seconds"]
    copy_rate = median["bytes"] / median["copy_seconds"]
    return {
        "step_seconds": median["step_seconds"],
        "blocked_seconds": median["blocked_seconds"],
        "blocked_steps": median["blocked_seconds"] / median["step_seconds"],
        "write_seconds": median["write_seconds"],
        "idle_write_seconds": median["idle_write_seconds"],
        "bytes": int(median["bytes"]),
        "bytes_over_minimum": median["bytes"] / median["minimum_bytes"],
        "write_rate": write_rate,
        "copy_rate": copy_rate,
        "rate_over_copy": write_rate / copy_rate,
        "saves": saves,
        "ranks": ranks,
    }
