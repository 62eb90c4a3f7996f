"""`dsx bench resume`: runs that are stopped and brought back, against runs that never stopped.

Two parts. *Kills*: one cluster is killed with SIGKILL at random moments of its run, and goes on
each time with the command that it printed. *Matrix*: two clusters are stopped by SIGTERM in the
middle of a round and brought back in fresh processes, for every precision, layout, delay, own
share and codec.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsx.bench.resume_kills import killed_runs
from dsx.bench.resume_matrix import LAYOUTS, compared_cases
from dsx.settings import load_settings

QUICKSTART = "configs/quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--kills", type=int, default=20, help="random moments (default: 20)")
    parser.add_argument(
        "--kills-per-run", type=int, default=1, help="one after the other (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument(
        "--layouts",
        nargs="*",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        metavar="SxD",
        help=f"stages x replicas of the matrix (default: {' '.join(LAYOUTS)}); none leaves it out",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every N-th of a layout's 42 cases; 4 still has every value of every setting",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code: 1 when a run was not the same."""
    # What it has started is ended with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    result = run_resume_bench(
        arguments.deepspeed_config,
        arguments.overrides,
        arguments.kills,
        arguments.kills_per_run,
        arguments.layouts,
        arguments.every,
        arguments.seed,
        tell=(lambda line: None) if arguments.json else _print,
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"kills: {result['kills_equal']} of {result['kills']} ended with the same digest")
        print(f"matrix: {result['cases_equal']} of {result['cases']} went on bit for bit")
    return 0 if all(row["same"] for row in result["rows"]) else 1


def run_resume_bench(
    deepspeed_config: str | Path = QUICKSTART,
    overrides: Sequence[str] = (),
    kills: int = 20,
    kills_per_run: int = 1,
    layouts: Sequence[str] = LAYOUTS,
    every: int = 1,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Stop runs, bring them back, and compare them with undisturbed ones.

    Args:
        deepspeed_config: settings of the run that is killed; the matrix takes its data.
        kills: random moments at which runs are killed, in all.
        kills_per_run: that one run takes before it is left to come to its end.
        layouts: "stages x replicas" of the matrix's clusters.
        every: of a layout's cases, every so many-th.
        seed: of the random moments.
        tell: called with a line for every result.

    Returns:
        `rows`: `what` and whether it is the `same`, for every killed run and every case of the
        matrix: every loss, digest and tensor of the last checkpoint; `kills`, `kills_equal`,
        `cases`, `cases_equal`: their numbers.

    Raises:
        LaunchError: a run that was not killed failed.
    """
    settings = load_settings(deepspeed_config, overrides)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as name:
        folder = Path(name)
        killed = list(killed_runs(settings, kills, kills_per_run, seed, folder, tell))
        for run in killed:
            rows.append({"what": f"killed {'; '.join(run.hits)}", "same": run.same})
        cases = 0
        for layout in layouts:
            for case, same in compared_cases(settings, layout, every, folder):
                cases += 1
                tell(f"{case}: {'the same bits' if same else 'DIFFERENT'}")
                rows.append({"what": case, "same": same})
    return {
        "rows": rows,
        "kills": sum(len(run.hits) for run in killed),
        "kills_equal": sum(len(run.hits) for run in killed if run.same),
        "cases": cases,
        "cases_equal": sum(row["same"] for row in rows[len(killed) :]),
    }


def _print(line: str) -> None:
    print(line, flush=True)
