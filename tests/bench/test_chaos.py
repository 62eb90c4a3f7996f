"""Real clusters that are broken come together again, and end with the same shared weights."""

import random
from pathlib import Path
from typing import Any

import pytest

from dsx.bench.chaos import Chaos, Row
from dsx.settings import load_settings
from dsx.tracking.events import RunEvent, of_kind, read_events
from tests.bench.test_overhead import settings_file


class Broken:
    """Two clusters of two stages, broken in four ways in one launch."""

    def __init__(self, folder: Path) -> None:
        chaos = Chaos(load_settings(settings_file(folder)), folder, 2, random.Random(0), None)
        self.rows: dict[str, Row] = {}
        try:
            chaos.begin()
            first, second = chaos.sites
            for number, (kind, victim, phase) in enumerate(
                (
                    ("a rank is stopped", second, "between transfer and commit"),
                    ("the disk is full", first, "while saving"),
                    ("the coordinator is killed", first, ""),
                    ("a rank is killed", first, "in mid-transfer"),
                )
            ):
                self.rows[kind] = chaos.break_at(kind, victim, number, phase)
            self.result: dict[str, Any] = chaos.finish()
            (begun, *_) = of_kind(read_events(chaos.run_dir), RunEvent)
            self.round_tokens = (
                begun.settings["train_micro_batch_size_per_gpu"]
                * begun.settings["gradient_accumulation_steps"]
                * begun.settings["dsx"]["data"]["seq_len"]
                * begun.settings["dsx"]["outer"]["local_steps"]
            )
            self.logs = {site.cluster: site.text() for site in chaos.sites}
        finally:
            chaos.end()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    return Broken(tmp_path_factory.mktemp("chaos"))


@pytest.mark.multiprocess
class TestBroken:
    def test_the_run_ends_with_equal_digests_after_every_round(self, broken: Broken) -> None:
        assert broken.result["different_rounds"] == []
        assert broken.result["rounds"] > len(broken.rows)
        assert broken.result["finished"]

    def test_nobody_is_held_up_for_more_than_two_rounds(self, broken: Broken) -> None:
        assert all(row.stalled <= 2 for row in broken.rows.values())

    def test_every_token_has_one_fate(self, broken: Broken) -> None:
        audit = broken.result["audit"]
        assert audit["problems"] == []
        assert audit["never_trained"] == audit["trained_twice"] == 0
        # One failure each: c0 is killed, c1 stopped for longer than it may stay away. What they had
        # trained since the last committed round is lost: one on the wire, one under way.
        for fate in audit["clusters"].values():
            assert fate["pending"] == 0
            assert 0 <= fate["lost"] <= 2 * broken.round_tokens

    def test_a_full_disk_costs_a_checkpoint_and_nothing_else(self, broken: Broken) -> None:
        assert "could not be written" in broken.logs["c0"]
        assert "No space left on device" in broken.logs["c0"]

    def test_clusters_train_on_while_the_coordinator_is_away(self, broken: Broken) -> None:
        for log in broken.logs.values():
            assert "does not answer" in log
            assert "answers again" in log

    def test_a_killed_rank_is_brought_back_by_the_command_that_was_printed(
        self, broken: Broken
    ) -> None:
        assert broken.logs["c0"].count("after an interruption, go on with: deepspeed") == 3
