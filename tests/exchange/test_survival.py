"""Real processes and sockets, real kills and stops at chosen moments of a round, in one launch."""

import itertools
import signal
from pathlib import Path

import pytest

from dsx.bench.faults import fail_at
from tests.exchange.light import Light, Lights
from tests.exchange.light_rank import TOKENS

SETTINGS = {"local_steps": 20, "delay": 2, "timeout_seconds": 60}
AFTER_VOTING, BEFORE_VOTING = "in mid-commit", "between transfer and commit"


class Story:
    """What befalls two clusters, one thing after the other."""

    def __init__(self, folder: Path) -> None:
        lights = Lights(folder, 2, SETTINGS)
        first, second = self.clusters = lights.clusters
        try:
            lights.begin()
            self.alone_while_stopped = self._stop(lights, first, second, BEFORE_VOTING)
            self._kill(lights, second, 0, AFTER_VOTING)
            self._kill(lights, first, 1, "in mid-transfer")
            self._kill_while_healing(lights, first, second)
            lights.kill_coordinator()
            self._wait_for(lights, "does not answer")
            self.rounds_without = [cluster.round for cluster in lights.clusters]
            lights.start_coordinator()
            lights.together()
            lights.finish()
            self.codes = [cluster.codes() for cluster in lights.clusters]
        finally:
            lights.close()

    def _stop(self, lights: Lights, other: Light, victim: Light, phase: str) -> int:
        """One rank stands still; returns the rounds that the other makes meanwhile."""
        lights.befall(fail_at(victim.name, 1, phase, victim.round + 1, "stop"))
        before = other.round
        lights.wait("a round alone", lambda: other.round > before + 1)
        victim.signal(signal.SIGCONT)
        lights.together()
        return other.round - before

    def _kill(self, lights: Lights, victim: Light, rank: int, phase: str) -> None:
        lights.befall(fail_at(victim.name, rank, phase, victim.round + 1))
        lights.together()

    def _kill_while_healing(self, lights: Lights, other: Light, victim: Light) -> None:
        victim.kill()
        before = other.round
        lights.wait("a round alone", lambda: other.round > before + 1)
        victim.start()
        lights.befall(fail_at(victim.name, 0, "while healing", 0))
        lights.together()

    def _wait_for(self, lights: Lights, text: str) -> None:
        lights.wait(text, lambda: all(text in cluster.log() for cluster in lights.clusters))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("survival"))


@pytest.mark.multiprocess
class TestSurvival:
    def test_all_end_with_the_same_shared_weights_and_tokens_after_every_round(
        self, story: Story
    ) -> None:
        assert story.codes == [[0, 0], [0, 0]]
        told: dict[int, set[tuple[str, int]]] = {}
        for cluster in story.clusters:
            for report in cluster.reports():
                state = (report["shared_digest"], report["tokens_total"])
                told.setdefault(report["round"], set()).add(state)
        assert len(told) > 20
        assert {number: states for number, states in told.items() if len(states) > 1} == {}
        first, second = (cluster.reports()[-1]["round"] for cluster in story.clusters)
        assert first == second

    def test_the_others_go_on_without_a_cluster_of_which_one_rank_stands_still(
        self, story: Story
    ) -> None:
        assert story.alone_while_stopped > 1

    def test_a_cluster_that_stood_still_sends_what_it_had_trained(self, story: Story) -> None:
        """In its next round: the tokens of two of its rounds beside one of the other's."""
        assert "took the shared state" in story.clusters[1].log()
        usual = 2 * SETTINGS["local_steps"] * TOKENS
        counted = [
            after["tokens_total"] - before["tokens_total"]
            for before, after in itertools.pairwise(story.clusters[0].reports())
            if after["round"] == before["round"] + 1
        ]
        assert max(counted) > usual

    def test_clusters_train_on_while_the_coordinator_is_away_and_find_the_new_one(
        self, story: Story
    ) -> None:
        for cluster, before in zip(story.clusters, story.rounds_without, strict=True):
            assert "answers again" in cluster.log()
            assert cluster.reports()[-1]["round"] > before
