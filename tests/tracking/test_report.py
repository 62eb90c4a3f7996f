"""The report: one page that needs nothing else and shows no text as markup."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dsx.cli.main import main
from dsx.errors import TrackingError
from dsx.tracking.events import Event
from dsx.tracking.jsonl import JsonlSink
from dsx.tracking.places import busy_shares
from dsx.tracking.plots import (
    MAX_POINTS,
    RunData,
    loss_over_bytes,
    loss_over_time,
    loss_over_tokens,
    seconds_per_round,
)
from dsx.tracking.report import render_report, write_report
from dsx.tracking.round_plots import adaptation_over_rounds
from dsx.tracking.time_plots import membership, timeline
from tests.tracking.runs import (
    cluster_events,
    inner_event,
    outer_event,
    phases_event,
    run_event,
    write_run,
)

HOSTILE = "<script>alert(1)</script>&\"'$x^2$"


class Page(HTMLParser):
    """What a reader needs of a page: its elements, ids, links, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def write_events(run_dir: Path, events: list[Event]) -> None:
    for cluster in {event.cluster for event in events}:
        sink = JsonlSink(run_dir, cluster)
        for event in events:
            if event.cluster == cluster:
                sink.write(event)
        sink.close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


def test_the_page_has_every_plot_and_its_numbers(run_dir: Path):
    page = Page(render_report([run_dir]))
    plots = [name for name in page.ids if name.startswith("plot-")]
    assert plots == [
        *("plot-loss", "plot-loss-bytes", "plot-loss-time", "plot-bytes", "plot-utilization"),
        *("plot-speed", "plot-rounds", "plot-phases-0", "plot-timeline-0", "plot-membership-0"),
    ]
    assert page.tags.count("svg") == len(plots)
    for row in (
        ["tokens", "512"],
        ["held-out loss of the shared weights", "2.0000"],
        ["held-out bits per byte", "1.4427"],
        ["bytes sent between clusters", "2.00 kB"],
        ["per-step fp32 all-reduce would have sent", "32.0 kB"],
        ["times fewer bytes", "16.0"],
        ["stages", "2"],
        ["torch", "2.13.0"],
        ["dsx.name", "tiny"],
        ["gradient_clipping", "1.0"],
    ):
        assert row in page.rows
    assert page.rows[[row[0] for row in page.rows].index("c1")][1:6] == [
        "4",
        "2",
        "256",
        "4.0000",
        "1.0000",
    ]


@pytest.mark.parametrize(("rank", "panels"), [(0, 3), (8, 4)])
def test_steps_bytes_and_times_of_rounds_are_drawn_and_the_rank_if_there_is_one(
    rank: int, panels: int
):
    events = [outer_event("c0", n, local_steps=20 - n, rank=rank and rank - n) for n in (1, 2, 3)]
    figure = adaptation_over_rounds([RunData("tiny", events)])
    assert figure is not None
    drawn = [list(axes.lines[0].get_ydata()) for axes in figure.axes]
    assert len(drawn) == panels
    assert drawn[0] == [19, 18, 17]
    assert ([7, 6, 5] in drawn) == bool(rank)
    assert drawn[-2:] == [[500] * 3, [0.4] * 3]


def test_the_page_loads_nothing_and_its_ids_are_unique(run_dir: Path):
    text = render_report([run_dir, run_dir])
    page = Page(text)
    assert "http" not in text
    assert not {"script", "img", "iframe", "object", "embed"} & set(page.tags)
    assert all(link.startswith("#") or link == "data:," for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_plots_take_their_colours_from_the_page_in_light_and_dark(run_dir: Path):
    text = render_report([run_dir])
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    used = set(re.findall(r"var\((--[\w-]+)\)", "".join(drawings)))
    assert not re.search(r"#[0-9a-fA-F]{6}\b", "".join(drawings))
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for variable in used:
        assert f"{variable}: #" in light
        assert f"{variable}: #" in dark


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    events: list[Event] = [
        run_event(HOSTILE.replace("/", "-"), settings={"dsx": {"name": HOSTILE}, HOSTILE: HOSTILE}),
        inner_event(HOSTILE.replace("/", "-"), 1),
        inner_event(HOSTILE.replace("/", "-"), 2),
    ]
    write_events(tmp_path, events)
    text = render_report([tmp_path])
    assert "<script" not in text
    assert [HOSTILE, HOSTILE] in Page(text).rows
    assert "$x^2$" in text


def test_several_runs_stand_side_by_side(run_dir: Path, tmp_path: Path):
    renamed = [
        run_event(cluster, settings={"dsx": {"name": "other"}}) if event.kind == "run" else event
        for cluster in ("c0", "c1")
        for event in cluster_events(cluster)
    ]
    write_events(tmp_path, renamed)
    page = Page(render_report([run_dir, tmp_path]))
    assert ["", "tiny", "other"] in page.rows
    assert ["tokens", "512", "512"] in page.rows
    assert {"tiny: c0", "tiny: c1", "other: c0", "other: c1"} <= {row[0] for row in page.rows}
    assert {"plot-phases-0", "plot-phases-1"} <= set(page.ids)


def test_the_timeline_has_a_row_for_every_rank_and_the_last_rounds_that_all_recorded():
    events: list[Event] = [
        phases_event(cluster, round_, rank)
        for cluster, rounds in (("c0", (1, 2, 3, 101, 102)), ("c1", (1, 2, 3, 101)))
        for round_ in rounds
        for rank in (0, 1)
    ]
    figure = timeline(RunData("x", events), "what every rank did")
    assert figure is not None
    [axes] = figure.axes
    assert axes.get_title(loc="left") == "what every rank did, round 101"
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["c0, rank 0", "c0, rank 1", "c1, rank 0", "c1, rank 1"]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["inner steps", "wait for the exchange", "outer step", "exchange", "encode"]


def test_who_took_part_has_a_gap_where_a_cluster_was_away():
    members = {1: ["a", "b"], 2: ["a"], 3: ["a", "b"], 4: ["a", "b"]}
    events: list[Event] = [
        run_event("a", time=0.0),
        *(outer_event("a", n, time=60.0 * n, participants=who) for n, who in members.items()),
    ]
    figure = membership(RunData("x", events), "who took part")
    assert figure is not None
    bars = [
        [(box.x0, box.width) for path in bar.get_paths() for box in [path.get_extents()]]
        for bar in figure.axes[0].collections
    ]
    assert bars == [[(0.0, 4.0)], [(0.0, 1.0), (2.0, 2.0)]]


def test_utilization_is_the_share_of_the_time_in_inner_steps():
    events: list[Event] = [run_event(time=0.0)]
    # 64 tokens at 128 tokens/s take half of the second between two lines.
    events += [inner_event(step=step, time=float(step)) for step in range(1, 42)]
    assert busy_shares(events) == [(21, 0.5), (41, 0.5)]


def test_losses_are_drawn_over_time_without_the_gap_of_a_restart():
    events: list[Event] = [
        *(run_event(time=0.0), inner_event(step=1, time=60.0), inner_event(step=2, time=120.0)),
        *(run_event(time=9000.0), inner_event(step=3, time=9060.0)),
    ]
    figure = loss_over_time([RunData("x", events)])
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_xdata()) == [1.0, 2.0, 3.0]
    assert loss_over_bytes([RunData("x", events)]) is None  # nothing was sent


def test_a_run_in_progress_gets_its_page(tmp_path: Path):
    write_run(tmp_path)
    with (tmp_path / "metrics-c0.jsonl").open("a") as file:
        file.write('{"kind": "inner", "clus')  # being written
    (tmp_path / "metrics-c2.jsonl").touch()  # has only just started
    assert ["tokens", "512"] in Page(render_report([tmp_path])).rows


def test_a_run_without_a_step_still_gets_its_page(tmp_path: Path):
    write_events(tmp_path, [run_event()])
    page = Page(render_report([tmp_path]))
    assert "svg" not in page.tags
    assert ["tokens", "0"] in page.rows


def test_a_long_run_is_thinned_to_means_that_keep_its_course():
    steps = [inner_event(step=s, loss=float(s)) for s in range(1, 10_001)]
    figure = loss_over_tokens([RunData("x", steps)])
    assert figure is not None
    [line] = figure.axes[0].lines
    assert MAX_POINTS / 2 < len(line.get_xdata()) <= MAX_POINTS
    assert list(line.get_xdata()) == pytest.approx([64 * y for y in line.get_ydata()])


def test_the_bars_of_a_round_are_its_own_steps_and_its_own_exchange():
    events: list[Event] = [
        # The average of round 1 arrives in the midst of round 2; a step takes 0.5 s, later 1 s.
        *(inner_event(step=s, tokens_per_second=128.0 if s <= 2 else 64.0) for s in (1, 2, 3)),
        outer_event(round_=1, blocked_seconds=0.25, exchange_seconds=0.75),
        inner_event(step=4, tokens_per_second=64.0),
        outer_event(round_=2, blocked_seconds=0.5, exchange_seconds=1.5),
    ]
    figure = seconds_per_round(RunData("x", events), "title")
    assert figure is not None
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([1.0, 2.0, 0.25, 0.5, 0.75, 1.5])


def test_the_command_writes_the_page_where_it_says(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "pages" / "out.html"
    assert main(["report", "--run", str(run_dir), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert os.listdir(output.parent) == ["out.html"]


def test_a_page_that_could_not_be_written_leaves_the_old_one(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "report.html"
    old = render_report([run_dir])
    output.write_text(old)

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_report([run_dir], output)
    assert output.read_text() == old
    assert os.listdir(tmp_path) == ["report.html"]


def test_only_an_earlier_page_is_replaced(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    metrics = next(run_dir.glob("metrics-*.jsonl"))
    before = metrics.read_bytes()
    assert main(["report", "--run", str(run_dir), "--output", str(metrics)]) == 1
    assert f"{metrics} is there already and no report" in capsys.readouterr().err
    assert metrics.read_bytes() == before
    page = str(tmp_path / "report.html")
    assert main(["report", "--run", str(run_dir), "--output", page]) == 0
    assert main(["report", "--run", str(run_dir), "--output", page]) == 0


def test_metrics_without_a_line_are_told(tmp_path: Path):
    (tmp_path / "metrics-c0.jsonl").touch()
    with pytest.raises(TrackingError, match="not one line"):
        render_report([tmp_path])


def test_a_folder_where_the_page_would_be_is_told_by_its_name(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    (run_dir / "report.html").mkdir()
    there = sorted(os.listdir(run_dir))
    assert main(["report", "--run", str(run_dir)]) == 1
    assert f"{run_dir}/report.html is a folder, so the page can't" in capsys.readouterr().err
    assert sorted(os.listdir(run_dir)) == there


def test_a_folder_without_metrics_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(TrackingError, match="holds no metrics"):
        write_report([tmp_path], tmp_path / "report.html")
    assert os.listdir(tmp_path) == []
