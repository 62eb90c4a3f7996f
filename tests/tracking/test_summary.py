"""The few numbers of a run, from made-up events whose sums are known."""

import math
from pathlib import Path

import pytest
from rich.console import Console

from dsx.tracking.summary import RunSummary
from dsx.tracking.summary_table import print_summary
from tests.tracking.runs import (
    BYTES_SENT,
    PARAMETERS,
    cluster_events,
    eval_event,
    inner_event,
    outer_event,
    run_event,
    write_run,
)


def test_a_run_is_summed_over_its_clusters(tmp_path: Path):
    write_run(tmp_path)
    summary = RunSummary.from_run(tmp_path)
    assert summary.name == "tiny"
    assert [c.name for c in summary.clusters] == ["c0", "c1"]
    assert summary.parameters == PARAMETERS
    assert summary.tokens == 2 * 4 * 64
    assert summary.bytes_exchanged == 2 * 2 * BYTES_SENT
    assert summary.all_reduce_bytes == 2 * 4 * PARAMETERS * 4
    assert summary.times_fewer_bytes == pytest.approx(16.0)
    assert summary.shared_eval_loss == 2.0
    assert summary.bits_per_byte == pytest.approx(2.0 / math.log(2) / 2.0)
    assert summary.seconds == pytest.approx(5.0)


def test_a_cluster_keeps_its_first_and_last_loss_and_its_seconds(tmp_path: Path):
    write_run(tmp_path)
    cluster = RunSummary.from_run(tmp_path).clusters[0]
    assert (cluster.first_loss, cluster.last_loss) == (4.0, 1.0)
    assert (cluster.steps, cluster.rounds, cluster.tokens) == (4, 2, 256)
    assert cluster.compute_seconds == pytest.approx(4 * 64 / 128.0)
    assert cluster.blocked_seconds == pytest.approx(0.2)
    assert cluster.exchange_seconds == pytest.approx(0.8)


def test_one_cluster_alone_has_no_all_reduce_to_compare_with():
    summary = RunSummary.from_events(cluster_events("c0"), "solo")
    assert summary.all_reduce_bytes is None
    assert summary.times_fewer_bytes is None


def test_repeated_steps_count_once_but_the_bytes_of_repeated_rounds_were_sent():
    events = [
        *cluster_events("c0"),
        run_event(time=1_000.0),
        inner_event(step=4, time=1_001.0, loss=0.5),
        outer_event(round_=2, time=1_002.0),
    ]
    summary = RunSummary.from_events(events, "resumed")
    assert summary.clusters[0].steps == 4
    assert summary.clusters[0].rounds == 2
    assert summary.clusters[0].last_loss == 0.5
    assert summary.bytes_exchanged == 3 * BYTES_SENT
    assert summary.seconds == pytest.approx(5.0 + 2.0)


def test_the_last_shared_evaluation_counts_and_local_ones_do_not():
    events = [
        eval_event(step=2, loss=3.0),
        eval_event(step=4, loss=2.5),
        eval_event(step=4, loss=9.0, weights="local"),
    ]
    assert RunSummary.from_events(events, "x").shared_eval_loss == 2.5


def test_a_run_that_has_only_just_started_has_no_losses_yet():
    summary = RunSummary.from_events([run_event()], "x")
    assert summary.clusters[0].first_loss is None
    assert summary.shared_eval_loss is None
    assert summary.bits_per_byte is None
    assert summary.tokens == 0


def test_a_narrow_terminal_cuts_nothing_off(tmp_path: Path):
    name = "a-cluster-of-a-far-away-site"
    write_run(tmp_path, (name, "c1"))
    console = Console(width=44)
    with console.capture() as shown:
        print_summary(tmp_path, console)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.get()
    border = "\N{BOX DRAWINGS LIGHT VERTICAL}"
    cells = [line.split(border)[1].strip() for line in shown.get().splitlines() if border in line]
    assert name in "".join(cells)
