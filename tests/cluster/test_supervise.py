"""Clusters end together, with everything that they started, in bounded time."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsx.cluster import processes
from dsx.cluster.launch import ClusterLaunch, plan_launches
from dsx.cluster.supervise import run_clusters
from dsx.errors import LaunchError
from tests.cluster.fake_deepspeed import FakeDeepSpeed

REPOSITORY = Path(__file__).parents[2]
OTHERS_UP = ["c0", "c0-helper"]


class Display:
    """Remembers what it was told."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.phases: dict[str, list[str]] = {}
        self.updates = 0
        self.step_seconds = step_seconds

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def slowest_step(self) -> float:
        return self.step_seconds

    def update(self) -> None:
        self.updates += 1

    def set_phase(self, cluster: str, phase: str) -> None:
        self.phases.setdefault(cluster, []).append(phase)


def launches(fake: FakeDeepSpeed) -> list[ClusterLaunch]:
    return plan_launches(
        ["--deepspeed_config", "f.json"],
        2,
        1,
        "http://127.0.0.1:1",
        lambda name: fake.folder / "logs" / f"{name}.log",
        deepspeed=fake.command,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_clusters_that_succeed_leave_nothing_but_their_logs(tmp_path: Path):
    fake = FakeDeepSpeed(tmp_path, {"c0": "succeed", "c1": "succeed"})
    display = Display()
    run_clusters(launches(fake), display)
    assert display.phases == {"c0": ["finished"], "c1": ["finished"]}
    assert display.updates > 0
    for name in ("c0", "c1"):
        assert "[dsx] phase: done" in (tmp_path / "logs" / f"{name}.log").read_text()
        assert fake.call(name)["environment"]["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize("other", ["forever", "stubborn"])
def test_a_failing_cluster_ends_the_others_and_its_error_is_shown(tmp_path: Path, other: str):
    message = "noise\ndsx: ModelError: 3 layers can't fill 4 stages\nmore noise"
    failing = {"after": OTHERS_UP, "print": message, "code": 1}
    fake = FakeDeepSpeed(tmp_path, {"c0": other, "c1": failing})
    display = Display()
    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run_clusters(launches(fake), display, grace_seconds=1.0)
    assert time.monotonic() - started < 30
    assert str(caught.value) == (
        "cluster c1 failed with exit code 1: ModelError: 3 layers can't fill 4 stages\n"
        f"(the whole log: {tmp_path / 'logs' / 'c1.log'})"
    )
    assert {"c0", "c0-helper"} <= set(fake.pids())
    assert fake.alive() == []
    assert display.phases == {"c0": ["ending"], "c1": ["failed"]}


def test_an_error_that_another_cluster_caused_is_not_shown_as_the_first(tmp_path: Path):
    lost = {"after": ["c1"], "print": "dsx: ExchangeError: peer c1 was lost", "code": 1}
    cause = {"after": ["c0"], "print": "dsx: DataError: shard 3 is damaged", "code": 1}
    fake = FakeDeepSpeed(tmp_path, {"c0": lost, "c1": cause})
    with pytest.raises(LaunchError, match=r"cluster c1 failed .* DataError: shard 3 is damaged"):
        run_clusters(launches(fake), Display())


def test_a_command_that_succeeds_but_leaves_its_ranks_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "LEFT_BEHIND_SECONDS", 0.2)
    fake = FakeDeepSpeed(tmp_path, {"c0": "orphan", "c1": "succeed"})
    with pytest.raises(LaunchError, match="cluster c0 failed with exit code 1"):
        run_clusters(launches(fake), Display(), grace_seconds=1.0)
    assert {"c0", "c0-helper"} <= set(fake.pids())
    assert fake.alive() == []


def test_a_command_that_can_not_be_started_ends_those_that_were(tmp_path: Path):
    fake = FakeDeepSpeed(tmp_path, {"c0": "forever", "c1": "forever"})
    good, bad = launches(fake)
    missing = ClusterLaunch("c1", ("no/such/deepspeed",), bad.environment, bad.log)
    with pytest.raises(LaunchError, match="cluster c1 could not be started: no/such/deepspeed"):
        run_clusters([good, missing], Display(), grace_seconds=1.0)
    assert fake.alive() == []


DRIVER = """
import sys
from pathlib import Path
from dsx.cluster import supervise
from dsx.cluster.supervise import Stopped, run_clusters
from tests.cluster.fake_deepspeed import FakeDeepSpeed
from tests.cluster.test_supervise import Display, launches

fake = FakeDeepSpeed(Path(sys.argv[1]), {"c0": sys.argv[2], "c1": "forever"})
supervise.LONGEST_GRACE_SECONDS = float(sys.argv[5])
try:
    run_clusters(launches(fake), Display(float(sys.argv[4])), grace_seconds=float(sys.argv[3]))
except Stopped as stopped:
    print(stopped)
    sys.exit(128 + stopped.number)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_that_was_started(tmp_path: Path, number: signal.Signals):
    with driver(tmp_path, "stubborn", "0.5") as process:
        wait_for(lambda: all_up(tmp_path))
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert output.strip() == number.name
    assert process.returncode == 128 + number
    fake = FakeDeepSpeed(tmp_path, {})
    assert set(fake.pids()) == {"c0", "c0-helper", "c1", "c1-helper"}
    assert fake.alive() == []


def test_a_second_signal_does_not_wait_for_the_grace_to_pass(tmp_path: Path):
    with driver(tmp_path, "stubborn", "600") as process:
        wait_for(lambda: all_up(tmp_path))
        process.send_signal(signal.SIGINT)
        # Once c1 is gone, the first signal is known to have been handled.
        wait_for(lambda: "c1" not in FakeDeepSpeed(tmp_path, {}).alive())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert FakeDeepSpeed(tmp_path, {}).alive() == []


def test_the_grace_follows_the_slowest_inner_step(tmp_path: Path):
    with driver(tmp_path, "slow", "0", step_seconds="200") as process:
        wait_for(lambda: all_up(tmp_path))
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert "what has not ended after 600 s is killed, and a second signal does so at once" in told
    assert (tmp_path / "saved").exists(), "it was left the time to save"
    assert FakeDeepSpeed(tmp_path, {}).alive() == []


def test_the_grace_has_an_end_however_slow_steps_are(tmp_path: Path):
    with driver(tmp_path, "stubborn", "0", step_seconds="1e9", longest="1") as process:
        wait_for(lambda: all_up(tmp_path))
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert "what has not ended after 1 s is killed" in told
    assert FakeDeepSpeed(tmp_path, {}).alive() == []


def test_the_launcher_that_would_kill_its_ranks_is_not_asked_to_end(tmp_path: Path):
    fake = FakeDeepSpeed(tmp_path, {"c0": "slow", "c1": "slow"})
    trees = [processes.ProcessTree(one.command, one.environment, one.log) for one in launches(fake)]
    wait_for(lambda: all((tmp_path / "pids" / name).exists() for name in ("c0", "c1")))
    processes.end_all(trees, 60.0)
    assert [tree.exit_code() for tree in trees] == [75, 75], "the launchers ended with their ranks"


def driver(
    folder: Path, behaviour: str, grace: str, step_seconds: str = "0", longest: str = "600"
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), behaviour, grace, step_seconds, longest],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def all_up(folder: Path) -> bool:
    names = {"c0", "c0-helper", "c1", "c1-helper"}
    return all((folder / "pids" / name).exists() for name in names)
