"""The outer engine of several clusters, each in a process of its own behind a line of its own."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from dsx.bench.scale.bench import hear
from dsx.bench.scale.cluster import llama_shapes
from dsx.cli.main import EXIT_USAGE, main
from dsx.errors import LaunchError

RATE = 4e6
OUTER = json.dumps({"compression": {"matrices": "int4", "embeddings": "int4"}})
COMMAND = [sys.executable, "-m", "dsx.cli.main", "bench", "scale", "--json", "--rounds", "1"]


@pytest.mark.multiprocess
def test_bytes_follow_the_pattern_and_are_dealt_out_evenly() -> None:
    words = ["--clusters", "2,6", "--parameters", "400k", "--rate", "4mbit", "--outer", OUTER]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    two, six = json.loads(done.stdout)["rows"]
    # Each row is told when it is there, and clusters that are ended complain of nothing.
    row_told = r" clusters\n  an exchange took .* sent by each\n"
    assert re.fullmatch(f"2{row_told}6{row_told}", done.stderr)

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


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        ('{"momentum_warmup_step": 1}', "did you mean momentum_warmup_steps"),
        ('{"momentum": 2}', "momentum: is 2; it must be less than 1"),
        ('{"local_steps": 5}', "--outer: local_steps: the clusters of this bench"),
        ('{"delay":', 'is {"delay":, which is not JSON'),
        ("[]", "is []; give a JSON object"),
    ],
)
def test_wrong_outer_settings_are_told_as_those_of_a_file(
    outer: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "scale", "--outer", outer])
    except SystemExit as exit_:  # argparse's own way
        code = int(str(exit_.code))
    assert code == EXIT_USAGE
    assert said in capsys.readouterr().err


def _kill_itself(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(pipe: Connection) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (_kill_itself, "cluster 0 of 1 was killed, .*memory.* fewer --clusters or --parameters"),
        (_fail, "cluster 0 of 1 has ended with exit code 3"),
    ],
)
def test_a_cluster_that_has_ended_is_told_with_the_reason(
    body: Callable[[Connection], None], reason: str
) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    with pytest.raises(LaunchError, match=reason):
        hear([(process, ours)])
