"""Real clusters, stopped by a signal and brought back: as if nothing had happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.folders import RunFolder
from dsx.training.run import Launch
from tests.checkpoint.settings import STEPS, raw_settings
from tests.checkpoint.workers import checksums, history
from tests.distributed import run_ranks

pytestmark = pytest.mark.multiprocess

LOWRANK = {"matrices": {"type": "lowrank", "rank": 2}}
TOPK = {"matrices": {"type": "topk", "fraction": 0.1}}
CASES: dict[int, dict[str, tuple[dict[str, Any], int]]] = {
    # ranks -> name -> (settings, stop)
    1: {
        "fp32, plain": ({}, 13),
        "bf16, a whole round late": (
            {"bf16": True, "outer": {"delay": "round", "own_share": "mean"}},
            12,
        ),
    },
    2: {
        "two stages, two steps late": ({"stages": 2, "outer": {"delay": 2}}, 11),
        "two stages, bf16, tied, plain": ({"stages": 2, "bf16": True, "tied": True}, 12),
        "two replicas, low rank, the paper": (
            {
                "replicas": 2,
                "outer": {"delay": "round", "own_share": "none", "compression": LOWRANK},
            },
            14,
        ),
        "two replicas, bf16, top-k, no delay": (
            {"replicas": 2, "bf16": True, "outer": {"delay": 0, "compression": TOPK}},
            15,
        ),
    },
    4: {
        "four stages, tied": ({"stages": 4, "tied": True, "outer": {"delay": 3}}, 11),
        "two by two, bf16, tied": (
            {
                "stages": 2,
                "replicas": 2,
                "bf16": True,
                "tied": True,
                "outer": {"delay": 2, "own_share": "mean"},
            },
            16,
        ),
    },
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_stopped_cluster_goes_on_bit_for_bit(
    folder: Path, coordinators: Callable[[], str], ranks: int
) -> None:
    cases = {
        name: (
            raw_settings(folder, f"{ranks}-{number}-straight", **options),
            raw_settings(folder, f"{ranks}-{number}-stopped", **options),
            stop,
        )
        for number, (name, (options, stop)) in enumerate(CASES[ranks].items())
    }
    urls = [[coordinators() for _ in range(3)] for _ in cases]
    answers = run_ranks(
        "tests.checkpoint.workers:stop_and_go_on", ranks, list(cases.values()), urls
    )
    for (name, (straight, stopped, stop)), (saved, ended) in zip(
        cases.items(), answers[0], strict=True
    ):
        first, second = Path(straight["dsx"]["run_dir"]), Path(stopped["dsx"]["run_dir"])
        # The question whether to end travels with one more step.
        assert Path(saved).name in (f"step-{stop + 1:08}", f"step-{stop:08}"), name
        assert ended is None, name
        assert history(first) == history(second), name
        assert history(first)["losses"][-1][0] == STEPS, name
        assert checksums(first) == checksums(second), name


def test_a_run_goes_on_in_another_layout_with_every_tensor_as_it_was(
    folder: Path, coordinators: Callable[[], str]
) -> None:
    outer = {"delay": 3, "own_share": "mean", "compression": LOWRANK}
    raw = raw_settings(folder, "layout-1x1", tied=True, outer=outer)
    words = Launch("c0", coordinators(), None, "auto")
    # Stopped with a pseudo-gradient in the air.
    run_ranks("tests.checkpoint.workers:train", 1, raw, words, 11)
    source = "layout-1x1"
    for stages, replicas in ((2, 1), (3, 1), (1, 2), (1, 1)):
        target = f"layout-{stages}x{replicas}" + ("-again" if stages * replicas == 1 else "")
        raw = raw_settings(folder, target, stages=stages, replicas=replicas, tied=True, outer=outer)
        run_ranks(
            "tests.checkpoint.workers:relayout",
            stages * replicas,
            raw,
            str(folder / source),
            coordinators(),
        )
        moved = tensors(folder / target)
        assert moved == tensors(folder / source), target
        kinds = {key.rpartition("/")[0] for key in moved}
        assert {"outer/flight_start", "outer/flight_end", "outer/feedback"} <= kinds
        source = target


def test_a_run_of_no_steps_evaluates_and_leaves_no_checkpoint(
    folder: Path, coordinators: Callable[[], str]
) -> None:
    raws = [
        raw_settings(folder, "none-plain", stages=2, steps=0),
        raw_settings(folder, "none-joined", stages=2, steps=0, outer={"delay": 2}),
    ]
    answers = run_ranks("tests.checkpoint.workers:evaluate_only", 2, raws, [None, coordinators()])
    assert answers[0] == [None, None]
    for raw in raws:
        run = Path(raw["dsx"]["run_dir"])
        told = history(run)
        assert list(told["evaluations"]) == [0]
        assert (told["losses"], told["rounds"]) == ([], {})
        assert not (run / "checkpoints").exists()
    plain, joined = (
        history(folder / f"none-{name}")["evaluations"] for name in ("plain", "joined")
    )
    assert plain == joined  # the shared weights are those that everybody starts with


def tensors(run: Path) -> dict[str, int]:
    """All but the ranks' own random numbers."""
    return {key: sum_ for key, sum_ in checksums(run).items() if not key.startswith("rng/")}


def test_nothing_is_left_half_written(folder: Path) -> None:
    for run in folder.iterdir():
        if (run / "checkpoints").is_dir():
            for cluster in RunFolder(run).clusters():
                assert RunFolder(run).list(cluster).damaged == []
                left = list(RunFolder(run).cluster_folder(cluster).glob(".*"))
                assert left == []
