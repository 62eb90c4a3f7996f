"""The lines of a metrics file: fixed keys, an exact way back, and what a crash may leave."""

import json
import math
from pathlib import Path

import pytest

from dsx.errors import TrackingError
from dsx.tracking.events import (
    InnerEvent,
    latest_by_step,
    metrics_path,
    read_events,
    read_file,
    to_line,
)
from dsx.tracking.jsonl import JsonlSink
from tests.tracking.runs import (
    cluster_events,
    eval_event,
    inner_event,
    outer_event,
    run_event,
    write_run,
)

COMMON = {"kind", "cluster", "time"}
KEYS = {
    "inner": {"step", "round", "loss", "lr", "grad_norm", "tokens", "tokens_per_second"},
    "outer": {
        "round",
        "participants",
        "bytes_sent",
        "bytes_received",
        "exchange_seconds",
        "blocked_seconds",
        "local_steps",
        "codec",
        "pseudo_gradient_norm",
        "shared_digest",
        "tokens_total",
    },
    "eval": {"step", "round", "loss", "weights"},
    "run": {"settings", "versions", "model_size", "layout"},
}


@pytest.mark.parametrize("event", [run_event(), inner_event(), outer_event(), eval_event()])
def test_each_kind_of_line_has_its_fixed_keys(event):
    record = json.loads(to_line(event))
    assert KEYS[record["kind"]] | COMMON <= set(record)


def test_written_events_are_read_back_equal_cluster_by_cluster(tmp_path: Path):
    write_run(tmp_path)
    assert read_events(tmp_path) == cluster_events("c0") + cluster_events("c1")


def test_a_number_that_is_not_finite_is_null_in_the_file_and_nan_again_when_read(tmp_path: Path):
    sink = JsonlSink(tmp_path, "c0")
    sink.write(inner_event(loss=math.inf, grad_norm=math.nan))
    sink.close()
    assert json.loads(sink.path.read_text())["loss"] is None
    [event] = read_events(tmp_path)
    assert isinstance(event, InnerEvent)
    assert math.isnan(event.loss)
    assert math.isnan(event.grad_norm)


def test_every_line_can_be_read_while_the_file_is_still_open(tmp_path: Path):
    sink = JsonlSink(tmp_path, "c0")
    for step in (1, 2, 3):
        sink.write(inner_event(step=step))
        assert len(read_events(tmp_path)) == step
    sink.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    write_run(tmp_path, ("c0",))
    path = metrics_path(tmp_path, "c0")
    path.write_bytes(path.read_bytes()[:-7])
    assert read_events(tmp_path) == cluster_events("c0")[:-1]


@pytest.mark.parametrize("cut", [1, 7])
def test_a_resumed_cluster_goes_on_in_the_same_file_after_a_torn_line(tmp_path: Path, cut: int):
    write_run(tmp_path, ("c0",))
    path = metrics_path(tmp_path, "c0")
    path.write_bytes(path.read_bytes()[:-cut])
    sink = JsonlSink(tmp_path, "c0")
    sink.write(run_event(time=200.0))
    sink.close()
    # Only a line that lacks nothing but its newline is whole.
    kept = cluster_events("c0") if cut == 1 else cluster_events("c0")[:-1]
    assert read_events(tmp_path) == [*kept, run_event(time=200.0)]


def test_a_damaged_line_inside_the_file_is_named(tmp_path: Path):
    path = metrics_path(tmp_path, "c0")
    path.write_text(to_line(run_event()) + "{oops\n" + to_line(inner_event()))
    with pytest.raises(TrackingError, match=r"metrics-c0\.jsonl, line 2 is not JSON"):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "is no line of a run: it has no 'kind'; expected one of run, inner, outer, eval"),
        ('{"loss": "x"}', "is no line of a run: it has no 'kind'"),
        ('{"kind": 3}', "is no line of a run: its 'kind' is 3"),
        ("[1, 2]", "is [1, 2], not a JSON object"),
        (
            '{"kind": "eval", "cluster": "c0", "time": 1.0, "step": 3}',
            "a line of kind 'eval' has no 'round'",
        ),
        (
            {"kind": "eval", "weights": "own"},
            """a line of kind 'eval' has "own" as 'weights', expected""",
        ),
        (
            {"kind": "phases", "rank": 0, "spans": [["x", 1]]},
            "a line of kind 'phases' has no 'spans.0.2'",
        ),
        ('{"kind": "inner"}', "a line of kind 'inner' has no 'cluster'"),
        ({"loss": "x"}, """a line of kind 'inner' has "x" as 'loss', expected a number"""),
        ({"loss": "2.5"}, """a line of kind 'inner' has "2.5" as 'loss', expected a number"""),
        ({"step": 1.5}, "a line of kind 'inner' has 1.5 as 'step', expected an integer"),
        ({"step": None}, "a line of kind 'inner' has null as 'step', expected an integer"),
        ({"time": True}, "a line of kind 'inner' has true as 'time', expected a number"),
        ({"cluster": 0}, "a line of kind 'inner' has 0 as 'cluster', expected a text"),
    ],
)
def test_a_line_that_is_no_event_is_named_with_what_was_expected(
    tmp_path: Path, line: str | dict[str, object], said: str
):
    text = line if isinstance(line, str) else json.dumps(json.loads(to_line(inner_event())) | line)
    path = metrics_path(tmp_path, "c0")
    path.write_text(f"{to_line(run_event())}{text}\n")
    with pytest.raises(TrackingError) as refused:
        read_events(tmp_path)
    told = str(refused.value).removeprefix(f"{path}, line 2").lstrip(": ")
    assert told.startswith(said)
    assert told.endswith("; remove or repair it")


def test_keys_and_kinds_of_a_later_version_are_skipped(tmp_path: Path):
    newer = json.loads(to_line(inner_event())) | {"colour": "blue"}
    path = metrics_path(tmp_path, "c0")
    path.write_text(json.dumps(newer) + '\n{"kind": "span", "cluster": "c0", "time": 1}\n')
    assert read_file(path) == [inner_event()]


def test_a_folder_without_metrics_is_refused(tmp_path: Path):
    with pytest.raises(TrackingError, match="holds no metrics"):
        read_events(tmp_path)


def test_a_value_that_is_not_json_is_refused():
    with pytest.raises(TrackingError, match="'run' line of cluster 'c0'"):
        to_line(run_event(settings={"path": object()}))


def test_a_step_repeated_after_a_resume_counts_as_it_was_last_trained():
    events = [inner_event(step=s, loss=9.0) for s in (1, 2, 3)] + [inner_event(step=2, loss=1.0)]
    assert [(e.step, e.loss) for e in latest_by_step(events)] == [(1, 9.0), (2, 1.0), (3, 9.0)]
