"""`dsx bench resume`: runs that are stopped and brought back, against runs that never stopped.

Two parts. *Kills*: one cluster is killed with SIGKILL at random moments of its run, and started
again with the same command. *Matrix*: two clusters are stopped by SIGTERM in the middle of a round
and brought back in fresh processes, for every precision, layout, delay, own share and codec.
"""

import argparse
import itertools
import json
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.cluster.launch import deepspeed_command, free_ports, usable_cores, visible_gpus
from dsx.cluster.processes import ProcessTree
from dsx.errors import LaunchError
from dsx.settings import Settings, load_settings, parse_settings

QUICKSTART = "configs/quickstart.json"
LAYOUTS = ("1x1", "2x1", "4x1", "1x2", "2x2", "4x2")
LOCAL_STEPS, DELAY = 5, 2
STEPS = 8 * LOCAL_STEPS
"""Of a run of the matrix: 20 steps and more than 3 rounds after the latest stop."""

_CODECS: dict[str, dict[str, Any]] = {
    "int4": {"matrices": "int4", "vectors": "none"},
    "topk": {"matrices": {"type": "topk", "fraction": 0.05}, "feedback_decay": 0.95},
    "lowrank": {"matrices": {"type": "lowrank", "rank": 4}},
}
_OVERLAPS = (
    (0, "all"),
    *itertools.product((DELAY, "round"), ("none", "all", "mean")),
)
_CASES_A_LAUNCH = 7
_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deepspeed_config", default=QUICKSTART, metavar="FILE")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--kills", type=int, default=20, help="random moments (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument(
        "--layouts",
        nargs="*",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        metavar="SxD",
        help=f"stages x replicas of the matrix (default: {' '.join(LAYOUTS)}); none leaves it out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code: 1 when a run was not the same."""
    result = run_resume_bench(
        arguments.deepspeed_config,
        arguments.overrides,
        arguments.kills,
        arguments.layouts,
        arguments.seed,
        tell=None if arguments.json else print,
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"kills: {result['kills_equal']} of {result['kills']} ended with the same digest")
        print(f"matrix: {result['cases_equal']} of {result['cases']} went on bit for bit")
    whole = result["kills_equal"] == result["kills"] and result["cases_equal"] == result["cases"]
    return 0 if whole else 1


def run_resume_bench(
    deepspeed_config: str | Path = QUICKSTART,
    overrides: Sequence[str] = (),
    kills: int = 20,
    layouts: Sequence[str] = LAYOUTS,
    seed: int = 0,
    tell: Any = None,
) -> dict[str, Any]:
    """Stop runs, bring them back, and compare them with undisturbed ones.

    Args:
        deepspeed_config: settings of the run that is killed; the matrix takes its data.
        kills: random moments at which it is killed.
        layouts: "stages x replicas" of the matrix's clusters.
        seed: of the random moments.
        tell: called with a line for every result.

    Returns:
        `kills`, `kills_equal`: runs killed, and those that ended with the same shared digest;
        `cases`, `cases_equal`: of the matrix, and those whose every loss, digest and tensor of the
        last checkpoint was the same; `different`: names of the others.

    Raises:
        LaunchError: a run that was not killed failed.
    """
    say = tell or (lambda line: None)
    settings = load_settings(deepspeed_config, overrides)
    different: list[str] = []
    cases = 0
    with tempfile.TemporaryDirectory(prefix="dsx-bench-") as name:
        folder = Path(name)
        if kills:
            for moment, same in _kills(settings, kills, random.Random(seed), folder, say):
                if not same:
                    different.append(f"kill after {moment:.1f} s")
        killed_different = len(different)
        for layout in layouts:
            for case, same in _matrix(settings, layout, folder):
                cases += 1
                say(f"{case}: {'the same bits' if same else 'DIFFERENT'}")
                if not same:
                    different.append(case)
    return {
        "kills": kills,
        "kills_equal": kills - killed_different,
        "cases": cases,
        "cases_equal": cases - (len(different) - killed_different),
        "different": different,
    }


# ---------------------------------------------------------------------- kills


def _kills(
    settings: Settings, kills: int, chance: random.Random, folder: Path, say: Any
) -> Iterator[tuple[float, bool]]:
    """(moment in seconds after the first step, whether the end was the same) of every kill."""
    undisturbed = folder / "undisturbed"
    expected = _whole_run(settings, undisturbed)
    first = _metrics(undisturbed, "inner")[0]["time"]
    duration = max(_metrics(undisturbed, kind)[-1]["time"] for kind in ("outer", "eval")) - first
    say(f"undisturbed: {duration:.1f} s of training, shared digest {expected}")
    for number in range(kills):
        moment = chance.uniform(0.0, duration)
        run_dir = folder / f"killed-{number}"
        reached = _killed_run(settings, run_dir, moment)
        digest = _whole_run(settings, run_dir)
        say(f"killed after {moment:.1f} s at step {reached}: shared digest {digest}")
        yield moment, digest == expected


def _whole_run(settings: Settings, run_dir: Path) -> str:
    """The last shared digest of a run that is left alone."""
    from dsx.exchange.coordinator import Coordinator

    with Coordinator("127.0.0.1:0") as coordinator:
        tree = _start(settings, run_dir, coordinator.address)
        while (code := tree.exit_code()) is None:
            time.sleep(0.1)
    if code:
        raise LaunchError(f"the run failed with exit code {code}:\n{_log(run_dir).read_text()}")
    return str(_metrics(run_dir, "outer")[-1]["shared_digest"])


def _killed_run(settings: Settings, run_dir: Path, moment: float) -> int:
    """Start it, kill it `moment` seconds after its first inner step; returns the last one."""
    from dsx.exchange.coordinator import Coordinator

    with Coordinator("127.0.0.1:0") as coordinator:
        tree = _start(settings, run_dir, coordinator.address)
        while not _metrics(run_dir, "inner") and tree.exit_code() is None:
            time.sleep(0.05)
        until = time.monotonic() + moment
        while time.monotonic() < until and tree.exit_code() is None:
            time.sleep(0.02)
        while not tree.is_gone():
            tree.signal(signal.SIGKILL)
            time.sleep(0.05)
    steps = _metrics(run_dir, "inner")
    return int(steps[-1]["step"]) if steps else 0


def _start(settings: Settings, run_dir: Path, coordinator: str) -> ProcessTree:
    raw = settings.model_dump(mode="json", exclude_none=True)
    raw["dsx"]["run_dir"] = str(run_dir)
    raw["dsx"]["tracking"]["wandb"] = False
    if raw["dsx"]["outer"]["delay"] == "auto":
        # It follows measured times, which no two runs share: what it starts with instead.
        raw["dsx"]["outer"]["delay"] = math.ceil(raw["dsx"]["outer"]["local_steps"] / 5)
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "settings.json"
    file.write_text(json.dumps(raw))
    command = [
        *_deepspeed(settings.dsx.pipeline.stages, "dsx.train"),
        *("--deepspeed_config", str(file), "--coordinator", coordinator),
    ]
    return ProcessTree(command, _environment(settings.dsx.pipeline.stages), _log(run_dir))


def _log(run_dir: Path) -> Path:
    return run_dir / "log"


def _metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    from dsx.tracking.events import metrics_path

    path = metrics_path(run_dir, "c0")
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [line for line in map(json.loads, whole) if line["kind"] == kind]


# ---------------------------------------------------------------------- matrix


@dataclass(frozen=True)
class _Case:
    name: str
    settings: dict[str, Any]
    stop: int


def _matrix(settings: Settings, layout: str, folder: Path) -> Iterator[tuple[str, bool]]:
    """(name, whether it went on bit for bit) of every case of a layout."""
    cases = list(_cases(settings, layout))
    for at in range(0, len(cases), _CASES_A_LAUNCH):
        yield from _together(cases[at : at + _CASES_A_LAUNCH], layout, folder)


def _cases(settings: Settings, layout: str) -> Iterator[_Case]:
    stages = int(layout.split("x")[0])
    grid = itertools.product((False, True), _OVERLAPS, _CODECS.items())
    for number, (bf16, (delay, share), (codec, compression)) in enumerate(grid):
        raw = settings.model_dump(mode="json", exclude_none=True)
        raw |= {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": bf16},
        }
        raw.pop("train_batch_size", None)
        dsx = raw["dsx"]
        vocabulary = (dsx["model"].get("config") or {}).get("vocab_size", 4096)
        dsx["model"] = {"config": {**_MODEL, "vocab_size": vocabulary}}
        dsx["pipeline"] = {"stages": stages}
        dsx["data"]["seq_len"] = 32
        dsx["training"] |= {"steps": STEPS, "eval_every": 0, "eval_batches": 1}
        dsx["training"]["schedule"]["warmup_steps"] = 2
        dsx["outer"] = {
            "local_steps": LOCAL_STEPS,
            "delay": delay,
            "own_share": share,
            "start_clusters": 2,
            "compression": compression,
        }
        dsx["checkpoint"] = {"every_rounds": 3, "keep": 2}
        dsx["tracking"] = {"wandb": False}
        parse_settings(raw)
        name = f"{layout} {'bf16' if bf16 else 'fp32'} delay {delay} {share} {codec}"
        yield _Case(name, raw, stop=2 * LOCAL_STEPS + number % LOCAL_STEPS)


def _together(cases: list[_Case], layout: str, folder: Path) -> Iterator[tuple[str, bool]]:
    straight = [(case, f"{case.name} straight", None) for case in cases]
    stopped = [(case, f"{case.name} stopped", case.stop) for case in cases]
    again = [(case, f"{case.name} stopped", None) for case in cases]
    _launch([*straight, *stopped], layout, folder)
    _launch(again, layout, folder)
    for case in cases:
        one, other = folder / f"{case.name} straight", folder / f"{case.name} stopped"
        yield case.name, all(_same(one, other, cluster) for cluster in ("c0", "c1"))


def _launch(runs: Sequence[tuple[_Case, str, int | None]], layout: str, folder: Path) -> None:
    """All runs one after the other, in one start of two clusters."""
    from dsx.exchange.coordinator import Coordinator

    stages, replicas = map(int, layout.split("x"))
    ranks = stages * replicas
    with ExitStack() as coordinators:
        requests = []
        for case, run_dir, stop in runs:
            raw = json.loads(json.dumps(case.settings))
            raw["dsx"]["run_dir"] = str(folder / run_dir)
            address = coordinators.enter_context(Coordinator("127.0.0.1:0")).address
            requests.append({"settings": raw, "stop": stop, "coordinator": address})
        file = folder / "requests.json"
        file.write_text(json.dumps(requests))
        trees = {
            cluster: ProcessTree(
                [
                    *_deepspeed(ranks, "dsx.bench.resume_rank"),
                    *("--requests", str(file), "--cluster", cluster),
                ],
                _environment(2 * ranks),
                folder / f"{cluster}.log",
            )
            for cluster in ("c0", "c1")
        }
        try:
            while any(tree.exit_code() is None for tree in trees.values()):
                for cluster, tree in trees.items():
                    if tree.exit_code():
                        log = (folder / f"{cluster}.log").read_text(errors="replace")
                        raise LaunchError(f"cluster {cluster} of the bench failed:\n{log[-6000:]}")
                time.sleep(0.1)
        finally:
            for tree in trees.values():
                while not tree.is_gone():
                    tree.signal(signal.SIGKILL)
                    time.sleep(0.05)


def _same(one: Path, other: Path, cluster: str) -> bool:
    """Whether two runs of a cluster left the same losses, digests and last checkpoint."""
    return _history(one, cluster) == _history(other, cluster)


def _history(run_dir: Path, cluster: str) -> Any:
    from dsx.checkpoint.folders import RunFolder
    from dsx.tracking.events import OuterEvent, latest_by_step, metrics_path, read_file

    events = read_file(metrics_path(run_dir, cluster))
    checkpoint = RunFolder(run_dir).list(cluster).complete[0]
    files = {**checkpoint.manifest.files}
    if checkpoint.shared is not None:
        files |= {f"shared {name}": file for name, file in checkpoint.shared.files.items()}
    return (
        [(event.step, event.loss, event.grad_norm) for event in latest_by_step(events)],
        {event.round: event.shared_digest for event in events if isinstance(event, OuterEvent)},
        checkpoint.manifest.step,
        files,
    )


def _deepspeed(ranks: int, module: str) -> list[str]:
    return [
        str(deepspeed_command()),
        *("--num_gpus", str(ranks), "--master_port", str(free_ports(1)[0])),
        *("--module", module),
    ]


def _environment(processes: int) -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    if not visible_gpus():
        environment["DS_ACCELERATOR"] = "cpu"
    return environment
