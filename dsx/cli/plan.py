"""`dsx plan`: fits or not, which layout, which rounds, how long, before a GPU is rented."""

import argparse
import json
from pathlib import Path

from dsx.cli.common import add_settings_arguments, count, seconds
from dsx.errors import SettingsError

HELP = "Say what a run needs and how fast it will be, before a GPU is rented."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.add_argument("--clusters", type=count, default=2, metavar="N", help="default: 2")
    parser.add_argument("--gpus-per-cluster", type=count, required=True, metavar="N")
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME",
        help="as a800-40g, or memory=80gb,tflops=312,..., or a JSON file with those keys",
    )
    parser.add_argument("--link", required=True, metavar="1gbit", help="of each cluster")
    parser.add_argument("--latency", default="0s", metavar="50ms", help="one way; default: none")
    parser.add_argument("--tokens", metavar="1t", help="of the whole run: days and cost")
    parser.add_argument("--price", type=float, metavar="USD", help="of a GPU and hour")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--mfu", type=float, metavar="0.4", help="share of the peak while a stage computes"
    )
    speed.add_argument(
        "--step-seconds",
        type=seconds,
        metavar="S",
        help="measured inner step of the settings' own layout, instead of --mfu",
    )
    parser.add_argument(
        "--as-set", action="store_true", help="keep the settings' layout and outer settings"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the planned settings")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        SettingsError: settings or arguments are wrong, or nothing fits.
        ModelError: the model can't be split or counted.
    """
    from dsx.settings.loading import apply_override, parse_settings, read_json
    from dsx.settings.units import read_count, read_rate, read_seconds

    raw = read_json(arguments.deepspeed_config)
    for override in arguments.overrides:
        apply_override(raw, override)
    settings = parse_settings(raw, source=arguments.deepspeed_config)
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        raise SettingsError(f"--mfu {arguments.mfu:g}: give a share above 0 and up to 1")

    from dsx.planning.hardware import UTILIZATION, read_gpu
    from dsx.planning.time import Link

    gpu = read_gpu(arguments.gpu)
    link = Link(read_rate(arguments.link, "--link"), read_seconds(arguments.latency, "--latency"))
    tokens = read_count(arguments.tokens, "--tokens") if arguments.tokens else None

    # Importing torch and transformers takes seconds, which wrong arguments need not wait for.
    from dsx.planning.plan import Planner, Request
    from dsx.planning.report import as_json, tables
    from dsx.planning.write import write_settings

    plan = Planner(settings).plan(
        Request(
            settings,
            arguments.clusters,
            arguments.gpus_per_cluster,
            gpu,
            link,
            arguments.mfu or UTILIZATION,
            arguments.step_seconds,
            arguments.as_set,
        )
    )
    if arguments.write:
        write_settings(arguments.write, raw, plan)
    if arguments.json:
        print(json.dumps(as_json(plan, tokens, arguments.price), allow_nan=False))
        return 0
    from rich.console import Console

    Console().print(tables(plan, tokens, arguments.price))
    if arguments.write:
        print(f"wrote {arguments.write}")
    return 0
