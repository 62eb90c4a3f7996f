"""`dsx plan`: fits or not, which layout, which rounds, how long, before a GPU is rented."""

import argparse
import json
from pathlib import Path
from typing import Any

from dsx.cli.common import (
    add_settings_arguments,
    count,
    output_file,
    picture_file,
    price,
    seconds,
)
from dsx.errors import DsxError, SettingsError
from dsx.settings import Settings

HELP = "Say what a run needs and how fast it will be, before a GPU is rented."

_MOST_CLUSTERS = 1000
_USAGE = """\
dsx plan --deepspeed_config FILE --gpus-per-cluster N --gpu NAME --link 1gbit [option ...]
       dsx plan --deepspeed_config FILE (--figure FILE.svg | --dry-run | --validate) [option ...]"""
"""argparse knows no argument that only some uses of a command need, and would call it optional."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    add_settings_arguments(parser)
    needed = parser.add_argument_group("needed for a plan")
    needed.add_argument("--gpus-per-cluster", type=count, metavar="N")
    needed.add_argument(
        "--gpu",
        metavar="NAME",
        help="as a800-40g, or memory=80gb,tflops=312,..., or a JSON file with those keys",
    )
    needed.add_argument("--link", metavar="1gbit", help="of each cluster")
    parser.add_argument("--clusters", type=count, default=2, metavar="N", help="default: 2")
    parser.add_argument("--latency", default="0s", metavar="50ms", help="one way; default: none")
    parser.add_argument("--tokens", metavar="1t", help="of the whole run: days and cost")
    parser.add_argument("--price", type=price, metavar="USD", help="of a GPU and hour")
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
    parser.add_argument(
        "--write", type=output_file, metavar="FILE", help="write the planned settings"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    other = parser.add_argument_group("instead of a plan").add_mutually_exclusive_group()
    other.add_argument(
        "--figure",
        type=picture_file,
        metavar="FILE.svg",
        help="draw this model and three others on 2 to 64 clusters, 0.1 to 10 Gbit/s",
    )
    other.add_argument(
        "--dry-run",
        action="store_true",
        help="lay out --stage and run the outer engine on one of its real layers",
    )
    other.add_argument(
        "--validate",
        action="store_true",
        help="run `dsx bench link` for three models and three rates (as root), and set predictions "
        "beside it; exit code 1 when one misses its bound",
    )
    parser.add_argument(
        "--from",
        dest="measured",
        type=Path,
        metavar="FILE",
        help="of --validate: what --json has written before, instead of measuring",
    )
    parser.add_argument("--stage", type=int, metavar="N", help="of --dry-run (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Plan, or whatever is asked for instead, and print.

    Raises:
        SettingsError: settings or arguments are wrong.
        PlanError: nothing fits.
        ModelError: the model can't be split or counted.
    """
    from dsx.settings.loading import load_with_raw

    if arguments.stage is not None and not arguments.dry_run:
        raise SettingsError(f"--stage {arguments.stage} is of --dry-run; add that, or leave it out")
    if arguments.measured is not None and not arguments.validate:
        raise SettingsError(f"--from {arguments.measured} is of --validate; add that")
    if arguments.write and (arguments.figure or arguments.dry_run or arguments.validate):
        raise SettingsError(f"--write {arguments.write} is of a plan; leave it out here")
    raw, settings = load_with_raw(arguments.deepspeed_config, arguments.overrides)
    if arguments.figure:
        return _figure(arguments, raw)
    if arguments.dry_run:
        return _dry_run(arguments, settings)
    if arguments.validate:
        return _validate(arguments)
    return _plan(arguments, raw, settings)


def _plan(arguments: argparse.Namespace, raw: dict[str, Any], settings: Settings) -> int:
    from dsx.settings.units import read_count, read_rate, read_seconds

    missing = [o for o in ("gpus_per_cluster", "gpu", "link") if getattr(arguments, o) is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise SettingsError(
            f"a plan needs {names}, too; for example "
            "--gpus-per-cluster 80 --gpu a800-40g --link 1gbit"
        )
    if not 2 <= arguments.clusters <= _MOST_CLUSTERS:
        raise SettingsError(
            f"--clusters {arguments.clusters}: a plan is of 2 to {_MOST_CLUSTERS} clusters (one "
            "exchanges with nobody)"
        )
    if arguments.mfu is not None and not 0 < arguments.mfu <= 1:
        raise SettingsError(f"--mfu {arguments.mfu:g}: give a share above 0 and up to 1")

    if arguments.write and arguments.write.exists():
        raise DsxError(f"--write {arguments.write}: there is such a file already; name another")

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

    Console(width=150).print(tables(plan, tokens, arguments.price))
    if arguments.write:
        print(f"wrote {arguments.write}")
    return 0


def _figure(arguments: argparse.Namespace, raw: dict[str, Any]) -> int:
    from dsx.planning.figure import draw
    from dsx.planning.scale import as_rows, points, table

    found = points(raw)
    draw(found, arguments.figure)
    if arguments.json:
        print(json.dumps({"rows": as_rows(found)}, allow_nan=False))
        return 0
    from rich.console import Console

    Console(width=160).print(table(found))
    print(f"wrote {arguments.figure}")
    return 0


def _dry_run(arguments: argparse.Namespace, settings: Settings) -> int:
    from dataclasses import asdict

    from dsx.models.config import load_config
    from dsx.models.plan import ModelPlan
    from dsx.planning.dry_run import dry_run

    model = ModelPlan(load_config(settings.dsx.model))
    found = dry_run(settings, model, settings.dsx.pipeline.stages, arguments.stage or 0)
    if arguments.json:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(f"{key:20} {value}" for key, value in asdict(found).items()))
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from dsx.planning.validate import checks, measure, read_measured, table

    if arguments.measured:
        measured = read_measured(arguments.measured)
    else:
        measured = measure(arguments.deepspeed_config, arguments.overrides)
    if arguments.json:
        print(json.dumps(measured))
    found = list(checks(measured))
    from rich.console import Console

    Console(width=140, stderr=arguments.json).print(table(found))
    return 0 if all(check.holds for check in found) else 1
