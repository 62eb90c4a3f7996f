"""`dsx simulate`: what settings cost in quality, tried out with many clusters in one process."""

import argparse
import json
import statistics
import sys
from pathlib import Path

from dsx.cli.common import add_settings_arguments, output_folder, seconds
from dsx.errors import SettingsError

HELP = "Try settings out: many clusters in one process, on a modelled link."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.add_argument("--clusters", type=int, required=True, metavar="N")
    parser.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="try every combination, as in outer.lr=0.5,0.7 outer.own_share=none,all; keys are "
        "seen from the dsx block, or from the whole file",
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        default=[],
        choices=["allreduce", "single"],
        help="allreduce: one model on all clusters' batches; single: one cluster alone",
    )
    parser.add_argument(
        "--tune",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="make the baselines with each of these, and compare with the best",
    )
    parser.add_argument("--seeds", default="", metavar="0,1,2", help="default: the file's")
    parser.add_argument(
        "--inner",
        choices=["settings", "muon"],
        default="settings",
        help="inner optimizer: the settings' (default), or Muon for the layers' matrices",
    )
    parser.add_argument("--link", metavar="100mbit", help="bandwidth of each cluster's slow link")
    parser.add_argument("--latency", default="0s", metavar="50ms", help="of a message on it")
    parser.add_argument(
        "--step-seconds",
        type=seconds,
        metavar="S",
        help="inner step time on the modelled clusters (default: the median measured here)",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each run")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--output",
        type=output_folder,
        metavar="DIR",
        help="results and plots; finished runs found there are not made again (default: run_dir)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the runs that are missing, and show all.

    Raises:
        SettingsError: settings or arguments are wrong.
        DsxError: a run failed.
    """
    from dsx.settings.loading import load_with_raw
    from dsx.settings.units import read_rate, read_seconds

    if min(arguments.clusters, arguments.jobs, arguments.threads) < 1:
        raise SettingsError("--clusters, --jobs and --threads must each be at least 1")
    raw, settings = load_with_raw(arguments.deepspeed_config, arguments.overrides)

    from rich.console import Console

    from dsx.simulation.compare import rows
    from dsx.simulation.execute import execute
    from dsx.simulation.link import Link
    from dsx.simulation.plots import write_plots
    from dsx.simulation.sweep import plan_runs, read_choices
    from dsx.simulation.table import as_json, table

    link = None
    if arguments.link:
        link = Link(
            read_rate(arguments.link, "--link"), read_seconds(arguments.latency, "--latency")
        )
    specs = plan_runs(
        raw,
        clusters=arguments.clusters,
        sweep=read_choices(arguments.sweep),
        baselines=arguments.baseline,
        tune=read_choices(arguments.tune),
        seeds=_seeds(arguments.seeds) or [settings.dsx.seed],
        inner=arguments.inner,
    )
    for spec in specs:
        spec.settings()  # every combination is checked before the first one runs
    folder = arguments.output or Path(settings.dsx.run_dir)
    finished = {}
    options = {"threads": arguments.threads, "device": arguments.device}
    for index, (spec, result), reused in execute(specs, folder, jobs=arguments.jobs, **options):
        finished[index] = (spec, result)
        how = "kept from before" if reused else f"{result.wall_seconds:.0f} s"
        print(
            f"[{len(finished)}/{len(specs)}] {spec.name} seed {spec.seed}: "
            f"loss {result.loss:.4f} ({how})",
            file=sys.stderr,
        )
    compared = rows([finished[index] for index in range(len(specs))])
    single = [r.step_seconds for s, r in finished.values() if s.kind != "allreduce"]
    seconds = arguments.step_seconds or statistics.median(
        single or [r.step_seconds / r.clusters for _, r in finished.values()]
    )
    written = write_plots(compared, folder, link, seconds)
    if arguments.json:
        print(json.dumps(as_json(compared, link, seconds), allow_nan=False))
    else:
        Console().print(table(compared, link, seconds))
        print("\n".join(f"wrote {path}" for path in written))
    return 0


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",") if seed]
    except ValueError:
        raise SettingsError(f"--seeds {text}: expected whole numbers, as in 0,1,2") from None
