"""torchft's own DiLoCo trains what dsx trains, and leaves the same kind of lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torchft.coordination import LighthouseServer

from dsx.bench.link.methods import TORCHFT, build_method
from dsx.bench.link.rows import measure
from dsx.errors import SettingsError
from dsx.settings import load_settings
from dsx.tracking.events import EvalEvent, of_kind, read_events
from tests.bench.tiny import NothingCounted, settings_file

STEPS, ROUND = 9, 3


@pytest.mark.multiprocess
def test_its_clusters_end_with_one_model_and_their_rounds_can_be_measured(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    overrides = [
        f"dsx.training.steps={STEPS}",
        f"dsx.outer.local_steps={ROUND}",
        "dsx.outer.delay=0",
        "dsx.pipeline.stages=1",
        "dsx.tracking.wandb=false",
    ]
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    port = server.address().rsplit(":", 1)[1]
    clusters = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "dsx.bench.link.torchft_rank"),
                *("--deepspeed_config", str(file), "--set", *overrides),
                *("--cluster", f"c{place}", "--place", str(place), "--clusters", "2"),
                *("--lighthouse", f"http://127.0.0.1:{port}", "--address", "127.0.0.1"),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in range(2)
    ]
    try:
        told = [cluster.communicate(timeout=300)[0] for cluster in clusters]
    finally:
        for cluster in clusters:
            cluster.kill()
        server.shutdown()
    assert [cluster.returncode for cluster in clusters] == [0, 0], told

    events = read_events(tmp_path / "untouched")
    one, other = of_kind(events, EvalEvent)
    assert one.loss == other.loss
    row = measure(TORCHFT, events, 0.0, NothingCounted(), 2)
    assert row["steps"] == STEPS
    assert row["local_steps"] == ROUND
    assert row["measured_rounds"] >= 1
    assert row["exchange_seconds"] > 0


def test_a_pipeline_is_not_what_it_wraps(tmp_path: Path) -> None:
    settings = load_settings(settings_file(tmp_path))
    with pytest.raises(SettingsError, match=r"dsx\.pipeline\.stages is 2"):
        build_method(TORCHFT, settings, 125)
