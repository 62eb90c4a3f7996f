"""The progress display: what it says of each cluster, on a terminal and elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from dsx.tracking.events import metrics_path, to_line
from dsx.tracking.phases import announce, phase_in
from dsx.tracking.progress import PLAIN_SECONDS, RECENT_STEPS, RunProgress, log_path
from dsx.tracking.tail import Tail
from tests.tracking.runs import eval_event, inner_event


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(run_dir: Path, clock: Clock) -> tuple[RunProgress, io.StringIO]:
    output = io.StringIO()
    progress = RunProgress(run_dir, ("c0", "c1"), 400, console=Console(file=output), clock=clock)
    return progress, output


def say(run_dir: Path, cluster: str, line: str) -> None:
    path = log_path(run_dir, cluster)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")


def append(run_dir: Path, cluster: str, text: str) -> None:
    with metrics_path(run_dir, cluster).open("a") as file:
        file.write(text)


def test_a_phase_that_a_rank_announces_is_found_in_its_log(capsys: pytest.CaptureFixture[str]):
    announce("preparing data")
    announce("preparing data", rank=1)
    line = capsys.readouterr().out.rstrip("\n")
    assert phase_in(line) == "preparing data"
    assert phase_in(f"2026-01-01 c0: {line}\x1b[0m") == "preparing data"
    assert phase_in("some other line") is None


def test_away_from_a_terminal_there_is_a_line_every_few_seconds_and_fewer_without_news(
    tmp_path: Path,
):
    clock = Clock()
    progress, output = plain(tmp_path, clock)
    with progress:
        assert output.getvalue() == "0 s: c0  starting | c1  starting\n"
        say(tmp_path, "c0", "[dsx] phase: preparing data")
        progress.update()
        assert output.getvalue().count("\n") == 1
        clock.now += PLAIN_SECONDS
        progress.update()
        assert output.getvalue().splitlines()[1:] == ["5 s: c0  preparing data | c1  starting"]
        clock.now += PLAIN_SECONDS
        progress.update()
        assert output.getvalue().count("\n") == 2
        clock.now = 71.0
        progress.update()
        assert output.getvalue().splitlines()[2:] == [
            "1 min 11 s: c0  preparing data | c1  starting"
        ]
        append(tmp_path, "c0", to_line(inner_event(step=12, loss=3.25, tokens_per_second=14_000)))
        append(tmp_path, "c0", to_line(eval_event(step=12, loss=2.5)))
    numbers = "loss 3.250  14.0 k tok/s  held-out 2.500"
    assert output.getvalue().splitlines()[3:] == [
        f"1 min 11 s: c0  training  12/400  {numbers} | c1  starting"
    ]


def test_lines_of_an_earlier_start_are_not_shown_as_progress(tmp_path: Path):
    append(tmp_path, "c0", to_line(inner_event(step=300)))
    progress, _ = plain(tmp_path, Clock())
    progress.update()
    assert progress.states[0].step == 0
    append(tmp_path, "c0", to_line(inner_event(step=301)))
    progress.update()
    assert (progress.states[0].step, progress.states[0].phase) == (301, "training")


def test_a_phase_after_the_steps_replaces_training(tmp_path: Path):
    progress, _ = plain(tmp_path, Clock())
    append(tmp_path, "c1", to_line(inner_event("c1", step=2)))
    progress.update()
    say(tmp_path, "c1", "[dsx] phase: saving")
    progress.update()
    assert progress.states[1].phase == "saving"
    append(tmp_path, "c1", to_line(inner_event("c1", step=3)))
    progress.update()
    assert progress.states[1].phase == "training"


def test_what_is_said_about_a_cluster_comes_after_what_it_said_itself(tmp_path: Path):
    progress, _ = plain(tmp_path, Clock())
    say(tmp_path, "c1", "[dsx] phase: saving")
    progress.set_phase("c1", "failed")
    progress.update()
    assert progress.states[1].phase == "failed"


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path: Path):
    progress, _ = plain(tmp_path, Clock())
    line = to_line(inner_event(step=5))
    append(tmp_path, "c0", line[:20])
    progress.update()
    assert progress.states[0].step == 0
    append(tmp_path, "c0", line[20:])
    progress.update()
    assert progress.states[0].step == 5


def test_on_a_terminal_every_cluster_has_a_bar_with_its_numbers(tmp_path: Path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    with RunProgress(tmp_path, ("c0", "c[1]"), 400, console=console) as progress:
        append(tmp_path, "c0", to_line(inner_event(step=100, loss=3.25)))
        say(tmp_path, "c[1]", "[dsx] phase: compiling [b]")
        progress.update()
    final = output.getvalue()
    assert "100/400" in final
    assert "loss 3.250" in final
    assert "c[1]" in final
    assert "compiling [b]" in final


def test_a_tail_gives_each_line_once(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old\n")
    tail = Tail(path)
    assert tail.new_lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert tail.new_lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert tail.new_lines() == ["two"]
    assert tail.new_lines() == []


def test_a_line_that_a_killed_process_had_begun_is_not_missed_when_it_is_cut(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old\nbeg")
    tail = Tail(path)
    path.write_text("old\n")
    with path.open("a") as file:
        file.write("new\n")
    assert tail.new_lines() == ["new"]


def test_the_slowest_step_is_that_of_the_last_ones_of_all_clusters(tmp_path: Path):
    progress, output = plain(tmp_path, Clock())
    with progress:
        assert progress.slowest_step() == 0
        at = 0.0
        for step, seconds in enumerate([50.0, 3.0, 7.0, *([2.0] * (RECENT_STEPS - 2))], start=1):
            at += seconds
            append(tmp_path, "c0", to_line(inner_event(step=step, time=at)))
        append(tmp_path, "c1", to_line(inner_event("c1", step=1, time=1000.0)))
        progress.update()
        assert progress.slowest_step() == 7
        append(tmp_path, "c1", to_line(inner_event("c1", step=2, time=1009.0)))
        progress.update()
        assert progress.slowest_step() == 9
        progress.tell("asked to end")
    assert "asked to end\n" in output.getvalue()
