"""Two clusters that are stopped in the middle of a round and go on in fresh processes."""

import copy
import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.bench.forked import run_forked
from dsx.bench.resume_history import history
from dsx.bench.resume_rank import Request
from dsx.settings import Settings, parse_settings

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
_MOST_CASES, _MOST_RUNS = 7, 14
"""Of one launch; the latter times a cluster's ranks. Every run leaves the process groups that it
made, and gloo wakes a thread of each a hundred times a second: together they would take the cores.
"""
_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class _Case:
    name: str
    settings: dict[str, Any]
    stop: int


def compared_cases(
    settings: Settings, layout: str, every: int, folder: Path
) -> Iterator[tuple[str, bool]]:
    """(name, whether it went on bit for bit) of every `every`-th of a layout's 42 cases."""
    cases = list(_cases(settings, layout))[::every]
    stages, replicas = map(int, layout.split("x"))
    together = max(1, min(_MOST_CASES, _MOST_RUNS // (stages * replicas)))
    for at in range(0, len(cases), together):
        yield from _together(cases[at : at + together], stages, replicas, folder)


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
        dsx["data"]["seq_len"] = 16
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


def _together(
    cases: list[_Case], stages: int, replicas: int, folder: Path
) -> Iterator[tuple[str, bool]]:
    straight = {case.name: folder / f"{case.name} straight" for case in cases}
    stopped = {case.name: folder / f"{case.name} stopped" for case in cases}
    first = [(case, straight[case.name], None) for case in cases]
    second = [(case, stopped[case.name], case.stop) for case in cases]
    third = [(case, stopped[case.name], None) for case in cases]
    _launch([*first, *second], stages * replicas, folder)
    _launch(third, stages * replicas, folder)
    for case in cases:
        one, other = straight[case.name], stopped[case.name]
        same = all(history(one, cluster) == history(other, cluster) for cluster in ("c0", "c1"))
        shutil.rmtree(one)
        shutil.rmtree(other)
        yield case.name, same


def _launch(runs: Sequence[tuple[_Case, Path, int | None]], ranks: int, folder: Path) -> None:
    """All runs one after the other, in one start of two clusters."""
    from dsx.exchange.coordinator import Coordinator

    with ExitStack() as coordinators:
        requests = []
        for case, run_dir, stop in runs:
            raw = copy.deepcopy(case.settings)
            raw["dsx"]["run_dir"] = str(run_dir)
            address = coordinators.enter_context(Coordinator("127.0.0.1:0")).address
            requests.append(Request(raw, address, stop))
        clusters = dict.fromkeys(("c0", "c1"), ranks)
        run_forked("dsx.bench.resume_rank:make_runs", clusters, folder, requests)
