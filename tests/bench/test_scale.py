"""The outer engine of several clusters, each in a process of its own behind a line of its own."""

import json
import math
import subprocess
import sys

import pytest

from dsx.bench.scale.cluster import llama_shapes
from dsx.cli.main import EXIT_USAGE, main

RATE = 4e6
OUTER = json.dumps({"compression": {"matrices": "int4", "embeddings": "int4"}})
COMMAND = [sys.executable, "-m", "dsx.cli.main", "bench", "scale", "--json", "--rounds", "1"]


@pytest.mark.multiprocess
def test_bytes_follow_the_pattern_and_are_dealt_out_evenly() -> None:
    words = ["--clusters", "2,6", "--parameters", "400k", "--rate", "4mbit", "--outer", OUTER]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    two, six = json.loads(done.stdout)["rows"]

    for row in (two, six):
        assert row["digests_equal"]
        assert row["most_sent_bytes"] < 1.1 * row["sent_bytes"]
        assert row["most_received_bytes"] < 1.1 * row["received_bytes"]
        # Shaped: what comes in takes its time.
        assert row["exchange_seconds"] > 0.8 * 8 * row["received_bytes"] / RATE
        assert 0 < row["private_bytes"] < row["proportional_bytes"]
    # Gathered, one payload; scattered, 5/6 of one twice.
    assert six["received_bytes"] == pytest.approx(10 / 6 * two["received_bytes"], rel=0.2)


@pytest.mark.parametrize("parameters", [400_000, 2_000_000, 50_000_000])
def test_the_made_up_model_has_the_size_that_was_asked_for(parameters: int) -> None:
    size = sum(math.prod(shape) for shape in llama_shapes(parameters).values())
    assert size == pytest.approx(parameters, rel=0.2)


def shaped(parameters: int) -> list[tuple[int, int]]:
    return [
        (shape[0], shape[-1] if len(shape) > 1 else 1)
        for shape in llama_shapes(parameters).values()
    ]


def test_a_number_of_clusters_that_has_no_exchange_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "scale", "--clusters", "1,2"]) == EXIT_USAGE
    assert "from 2 to 250" in capsys.readouterr().err
