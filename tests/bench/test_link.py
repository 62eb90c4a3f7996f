"""Real clusters on a slow link: what the rows say is what happened there."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dsx.bench.link.bench import LinkBench, run_link_bench
from dsx.bench.link.methods import build_methods
from dsx.bench.namespaces import OWNER
from dsx.errors import SettingsError
from dsx.settings import load_settings
from dsx.tracking.events import OuterEvent, of_kind, read_events
from tests.bench.tiny import settings_file

RATE = 500_000.0
STEPS, LOCAL_STEPS = 24, 4
BENCH = [sys.executable, "-m", "dsx.cli.main", "bench", "link", "--rate", "500kbit", "--json"]


def command(file: Path, output: Path, *more: str) -> list[str]:
    settings = ["--deepspeed_config", str(file), "--output", str(output)]
    overrides = [f"dsx.training.steps={STEPS}", f"dsx.outer.local_steps={LOCAL_STEPS}"]
    return [*BENCH, *settings, "--set", *overrides, "--methods", "dsx", *more]


@pytest.mark.multiprocess
def test_clusters_train_over_the_link_and_the_row_tells_how(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = subprocess.run(
        command(settings_file(tmp_path), runs), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    none, dsx = result["rows"]

    assert (none["method"], dsx["method"]) == ("none", "dsx")
    assert (result["clusters"], result["stages"]) == (2, 2)
    assert none["utilization"] == 1
    assert dsx["utilization"] == dsx["tokens_per_second"] / none["tokens_per_second"]
    assert dsx["rate"] == RATE
    assert dsx["steps"] == STEPS
    assert dsx["tokens"] == 2 * STEPS * 2 * 2 * 16
    assert math.isfinite(dsx["loss"])
    assert not (tmp_path / "untouched").exists()

    rounds = of_kind(read_events(runs / "2-dsx"), OuterEvent)
    assert len({each.shared_digest for each in rounds}) == STEPS // LOCAL_STEPS
    for each in rounds:  # shaped: nothing passes faster than the rate
        assert each.exchange_seconds > 0.8 * 8 * each.bytes_sent / RATE
    # Counted: what the engine says that it sent, and the headers around it.
    per_token = max(each.bytes_sent for each in rounds) / (LOCAL_STEPS * 2 * 2 * 16)
    assert per_token < dsx["sent_bytes_per_token"] < 3 * per_token
    assert none["sent_bytes_per_token"] < 0.05 * dsx["sent_bytes_per_token"]
    ranks = ["c0/0", "c0/1", "c1/0", "c1/1"]
    assert list(dsx["peak_rank_bytes"]) == ranks
    assert min(dsx["peak_rank_bytes"].values()) > 100e6


@pytest.mark.multiprocess
def test_ctrl_c_leaves_no_process_and_no_namespace(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    bench = subprocess.Popen(
        command(file, tmp_path / "runs"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert bench.stderr is not None
    assert next(line for line in bench.stderr if line.startswith("none:"))
    mark = owner_below(bench.pid)

    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=60) == 128 + signal.SIGINT

    assert not [process for process in psutil.process_iter() if owner_of(process) == mark]
    assert mark not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def owner_below(pid: int) -> str:
    """The mark of the link that a process has opened."""
    below = psutil.Process(pid).children(recursive=True)
    return next(mark for process in below if (mark := owner_of(process)))


def owner_of(process: psutil.Process) -> str | None:
    try:
        mark = process.environ().get(OWNER)
    except psutil.Error:
        return None
    return str(mark) if mark else None


def test_a_setting_of_a_method_that_is_refused_names_the_method(tmp_path: Path) -> None:
    bench = LinkBench(settings_file(tmp_path), methods=["diloco-fp32"], diloco_steps=0)
    with pytest.raises(SettingsError, match=r"^--methods diloco-fp32: dsx\.outer\.local_steps"):
        run_link_bench(bench)


def test_a_method_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    settings = load_settings(settings_file(tmp_path))
    with pytest.raises(SettingsError, match="allreduce, diloco-fp32, diloco-fp16, dsx"):
        build_methods(["diloco"], settings, 125)
