"""Several clusters of one rank each: stopped, brought back, joined by others and left alone."""

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.folders import Checkpoint, RunFolder
from dsx.tracking.audit import audit
from dsx.tracking.ledger import read_ledgers
from dsx.training.run import Launch
from tests.checkpoint.settings import STEPS, raw_settings
from tests.checkpoint.workers import checksums, history
from tests.distributed import run_ranks

pytestmark = pytest.mark.multiprocess


def launch(raw: dict[str, Any], url: str, stops: Mapping[str, int | None]) -> dict[str, Any]:
    """One launch of all clusters at once; for each, the folder it left when it was stopped."""
    raw["dsx"]["outer"]["start_clusters"] = len(stops)

    def one(cluster: str) -> Any:
        words = Launch(cluster, url, None, "auto")
        (saved,) = run_ranks("tests.checkpoint.workers:train", 1, raw, words, stops[cluster], False)
        return saved

    with ThreadPoolExecutor(len(stops)) as pool:
        return dict(zip(stops, pool.map(one, stops), strict=True))


def newest(run: Path, cluster: str) -> Checkpoint:
    return RunFolder(run).list(cluster).complete[0]


@pytest.mark.parametrize("delay", [0, "round"])
def test_two_clusters_that_stop_at_different_steps_go_on_bit_for_bit(
    folder: Path, coordinators: Callable[[], str], delay: object
) -> None:
    outer = {"delay": delay, "start_clusters": 2}
    straight = raw_settings(folder, f"straight-{delay}", outer=outer)
    stopped = raw_settings(folder, f"stopped-{delay}", outer=outer)
    launch(straight, coordinators(), {"c0": None, "c1": None})
    saved = launch(stopped, coordinators(), {"c0": 11, "c1": 13})
    assert all(saved.values())
    assert not any(launch(stopped, coordinators(), {"c0": None, "c1": None}).values())
    first, second = (Path(raw["dsx"]["run_dir"]) for raw in (straight, stopped))
    for cluster in ("c0", "c1"):
        assert history(first, cluster) == history(second, cluster)
        assert checksums(first, cluster) == checksums(second, cluster)
    for run in (first, second):
        fates = audit(read_ledgers([run]))
        assert fates.is_clean, fates.problems
        for fate in fates.clusters.values():
            assert fate.trained == fate.committed == STEPS * 4 * 16, "no step was made in vain"
        # Two rounds are kept of either cluster, and stored once for both.
        assert len(list((run / "checkpoints" / "shared").iterdir())) <= 3


def test_clusters_join_and_leave_between_launches(
    folder: Path, coordinators: Callable[[], str]
) -> None:
    raw = raw_settings(folder, "changing", outer={"delay": 2})
    run = Path(raw["dsx"]["run_dir"])
    launch(raw, coordinators(), {"c0": 12, "c1": 12})
    two = newest(run, "c0")
    assert two.manifest.clusters == ["c0", "c1"]

    saved = launch(raw, coordinators(), {"c0": 18, "c1": 18, "c2": 18})
    assert all(saved.values())
    three = {name: newest(run, name) for name in saved}
    for name, checkpoint in three.items():
        manifest = checkpoint.manifest
        assert manifest.clusters == ["c0", "c1", "c2"]
        assert manifest.optimizer_steps > two.manifest.optimizer_steps, name
        assert manifest.shared == three["c0"].manifest.shared
    # The third had no past: it began at the shared round, with another's moments.
    first_of_third = history(run, "c2")["losses"][0][0]
    assert first_of_third == two.manifest.round * 5 + 1
    rounds = history(run, "c2")["rounds"]
    assert all(entry[3] == ["c0", "c1", "c2"] for entry in rounds.values())
    for number, entry in rounds.items():
        assert history(run, "c0")["rounds"][number][0] == entry[0]

    assert launch(raw, coordinators(), {"c0": None}) == {"c0": None}
    alone = newest(run, "c0").manifest
    assert alone.step == STEPS
    assert alone.clusters == ["c0"]
    steps = [entry[0] for entry in history(run, "c0")["losses"]]
    assert steps == list(range(1, STEPS + 1))
    assert history(run, "c0")["rounds"][max(history(run, "c0")["rounds"])][3] == ["c0"]
    fates = audit(read_ledgers([run]))
    assert fates.is_clean, fates.problems
    assert fates.clusters["c0"].trained == fates.clusters["c0"].committed == STEPS * 4 * 16


def test_a_cluster_that_saved_less_goes_on_from_the_round_that_another_saved(
    folder: Path, coordinators: Callable[[], str]
) -> None:
    raw = raw_settings(folder, "behind", outer={"delay": 0})
    run = Path(raw["dsx"]["run_dir"])
    launch(raw, coordinators(), {"c0": 17, "c1": 17})
    ahead, lost = newest(run, "c0").manifest, newest(run, "c1")
    shutil.rmtree(lost.folder)  # As if it had died while it saved.
    behind = newest(run, "c1").manifest
    assert (behind.round, ahead.round) == (2, 3)

    # The one that saved more is not there to hand its state over.
    assert launch(raw, coordinators(), {"c1": None}) == {"c1": None}
    steps = [entry[0] for entry in history(run, "c1")["losses"]]
    assert steps == list(range(1, STEPS + 1))
    fates = audit(read_ledgers([run]))
    assert fates.is_clean, fates.problems
    assert fates.rounds > ahead.round
    # Only its steps after the round that c0 had saved were made in vain.
    assert fates.clusters["c1"].lost == (lost.manifest.step - 15) * 4 * 16


def test_a_cluster_asked_to_end_while_it_waits_for_the_others_ends_as_it_was(
    folder: Path, coordinators: Callable[[], str]
) -> None:
    raw = raw_settings(folder, "waiting", outer={"start_clusters": 2})
    words = Launch("c0", coordinators(), None, "auto")
    assert run_ranks("tests.checkpoint.workers:train", 1, raw, words, 0, False) == ["None"]
    assert not (folder / "waiting" / "checkpoints").exists()
