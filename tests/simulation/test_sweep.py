"""From arguments to runs, and from runs to the share of the gap kept."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from dsx.errors import SettingsError
from dsx.simulation.compare import Finished, rows, share_kept
from dsx.simulation.execute import execute
from dsx.simulation.link import Link
from dsx.simulation.result import Point, ResultStore, RunResult
from dsx.simulation.spec import RunSpec
from dsx.simulation.sweep import combinations, plan_runs, read_choices


def result(kind: Any, loss: float, seed: int = 0, **changes: Any) -> RunResult:
    values: dict[str, Any] = {
        "clusters": 2,
        "parameters": 1000,
        "steps": 100,
        "tokens": 6400,
        "bytes_per_step": 200.0,
        "fewer_bytes": 20.0,
        "rounds": 5,
        "bytes_per_round": 4000.0,
        "local_steps": 20,
        "delay": 4,
        "step_seconds": 0.1,
        "wall_seconds": 20.0,
        "curve": [Point(step=100, tokens=6400, bytes=20000.0, loss=loss)],
    }
    return RunResult(kind=kind, loss=loss, seed=seed, **{**values, **changes})


def test_choices_are_read_with_short_and_full_keys_and_json_values() -> None:
    choices = read_choices(
        ["outer.lr=0.5,0.7", 'outer.compression.matrices={"type":"topk","fraction":0.1},"int4"']
    )
    assert choices == {
        "dsx.outer.lr": ["0.5", "0.7"],
        "dsx.outer.compression.matrices": ['{"type":"topk","fraction":0.1}', '"int4"'],
    }
    assert list(read_choices(["optimizer.params.lr=1"])) == ["optimizer.params.lr"]


@pytest.mark.parametrize("wrong", ["outer.lr", "outer.lr=", "=1"])
def test_a_choice_of_another_form_is_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"as in outer\.lr="):
        read_choices([wrong])
    with pytest.raises(SettingsError, match="given twice"):
        read_choices(["outer.lr=1", "dsx.outer.lr=2"])


def test_combinations_are_the_cartesian_product() -> None:
    assert list(combinations({"a": ["1", "2"], "b": ["x", "y"]})) == [
        {"a": "1", "b": "x"},
        {"a": "1", "b": "y"},
        {"a": "2", "b": "x"},
        {"a": "2", "b": "y"},
    ]
    assert list(combinations({})) == [{}]


def plan(raw: dict[str, Any], **changes: Any) -> list[RunSpec]:
    options: dict[str, Any] = {
        "clusters": 2,
        "sweep": {},
        "baselines": ["allreduce", "single"],
        "tune": {},
        "seeds": [0, 1],
        "inner": "settings",
    }
    return plan_runs(raw, **{**options, **changes})


def test_baselines_follow_swept_data_but_not_the_outer_settings(raw: dict[str, Any]) -> None:
    outer = plan(raw, sweep={"dsx.outer.lr": ["0.5", "0.7"]}, tune={"optimizer.params.lr": ["1"]})
    assert [(spec.kind, spec.seed) for spec in outer] == [
        ("allreduce", 0), ("allreduce", 1), ("single", 0), ("single", 1),
        ("clusters", 0), ("clusters", 1), ("clusters", 0), ("clusters", 1),
    ]  # fmt: skip
    assert outer[0].raw["optimizer"]["params"]["lr"] == 1
    assert outer[4].raw["optimizer"]["params"]["lr"] == raw["optimizer"]["params"]["lr"]
    whole = plan(raw, sweep={"dsx.outer": ["{}", '{"lr": 0.5}']}, seeds=[0])
    assert [spec.kind for spec in whole] == ["allreduce", "single", "clusters", "clusters"]
    assert [spec.settings().dsx.outer.lr for spec in whole[2:]] == [0.7, 0.5]
    longer = plan(raw, sweep={"dsx.training.steps": ["8", "9"]}, seeds=[0])
    assert [spec.kind for spec in longer] == ["allreduce"] * 2 + ["single"] * 2 + ["clusters"] * 2
    assert [spec.name for spec in longer[-2:]] == ["training.steps=8", "training.steps=9"]


def test_the_digest_tells_apart_exactly_what_changes_a_result(raw: dict[str, Any]) -> None:
    def digest(**changes: Any) -> str:
        (spec,) = plan(raw, seeds=[0], **changes)[-1:]
        return spec.digest("data")

    plain = digest()
    assert digest() == plain
    assert digest(sweep={"dsx.name": ["other"]}) == plain
    assert digest(sweep={"dsx.outer.delay": ["1"]}) == plain, "as the file has it"
    assert digest(sweep={"dsx.outer.delay": ["2"]}) != plain
    assert digest(inner="muon") != plain
    assert digest(clusters=3) != plain
    baselines = [plan(raw, seeds=[0], baselines=["single"])[0]]
    (baselines_other,) = [plan(raw, seeds=[0], baselines=["single"], tune={"dsx.outer.lr": ["1"]})]
    assert baselines[0].digest("data") == baselines_other[0].digest("data")


@pytest.mark.parametrize("adapt", [{"balanced": True}, {"local_steps": "link"}])
def test_rules_that_follow_measured_times_are_refused(
    raw: dict[str, Any], adapt: dict[str, Any]
) -> None:
    raw = copy.deepcopy(raw)
    raw["dsx"].setdefault("outer", {})["adapt"] = adapt
    with pytest.raises(SettingsError, match=rf"adapt\.{next(iter(adapt))} follows measured times"):
        RunSpec(kind="clusters", raw=raw, clusters=2).settings()


def test_a_rule_that_adapts_makes_another_result(raw: dict[str, Any]) -> None:
    raw = copy.deepcopy(raw)
    raw["dsx"].setdefault("outer", {})["compression"] = {"matrices": {"type": "lowrank", "rank": 4}}
    fixed = RunSpec(kind="clusters", raw=raw, clusters=2).digest("data")
    raw["dsx"]["outer"]["adapt"] = {"rank": "paper"}
    assert RunSpec(kind="clusters", raw=raw, clusters=2).digest("data") != fixed


def test_kept_compares_with_the_best_tuned_baselines_seed_by_seed(raw: dict[str, Any]) -> None:
    specs = plan(raw, tune={"optimizer.params.lr": ["0.1", "0.2"]})
    losses = {
        ("allreduce", 0.1): [2.0, 2.2], ("allreduce", 0.2): [2.1, 2.3],
        ("single", 0.1): [3.0, 3.4], ("single", 0.2): [2.8, 3.2],
        ("clusters", None): [2.2, 2.2],
    }  # fmt: skip
    finished: list[Finished] = []
    for spec in specs:
        key = (spec.kind, spec.changed.get("optimizer.params.lr"))
        finished.append((spec, result(spec.kind, losses[key][spec.seed], spec.seed)))
    compared = rows(finished)
    assert [row.best for row in compared] == [True, False, False, True, False]
    *_, row = compared
    assert row.kept == pytest.approx((0.6 / 0.8, 1.0 / 1.0))
    assert row.kept_mean == pytest.approx(0.875)
    assert row.loss == pytest.approx(2.2)


def test_without_both_baselines_nothing_is_said_about_the_gap(raw: dict[str, Any]) -> None:
    specs = plan(raw, baselines=["single"], seeds=[0])
    compared = rows([(spec, result(spec.kind, 2.0)) for spec in specs])
    assert [row.kept for row in compared] == [(), ()]
    assert compared[0].kept_mean is None
    assert math.isnan(share_kept(2.0, 2.0, 2.0))


def test_a_late_average_stalls_only_for_what_its_delay_does_not_cover() -> None:
    run = result("clusters", 2.0)
    fast = Link(bandwidth=8 * 4000 / 0.3, latency=0.1)
    assert fast.exchange_seconds(4000.0) == pytest.approx(0.4)
    assert fast.run_seconds(run, 0.1, 100) == pytest.approx(10.0), "hidden behind 4 steps of 0.1 s"
    slow = Link(bandwidth=8 * 4000 / 0.9, latency=0.1)
    assert slow.run_seconds(run, 0.1, 100) == pytest.approx(10.0 + 5 * 0.6)
    alone = result("single", 2.0, bytes_per_round=0.0)
    assert slow.run_seconds(alone, 0.1, 100) == pytest.approx(10.0)


def test_an_interrupted_sweep_goes_on_where_it_was(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dsx.simulation.execute as module

    specs = plan(raw, seeds=[0])
    made: list[str] = []
    real = module.make_run

    def counted(spec: RunSpec, *rest: Any) -> RunResult:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(spec.kind)
        return real(spec, *rest)

    monkeypatch.setattr(module, "make_run", counted)
    options: dict[str, Any] = {"jobs": 1, "threads": 1, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt):
        list(execute(specs, tmp_path, **options))
    monkeypatch.setattr(module, "make_run", real)
    ended = list(execute(specs, tmp_path, **options))
    assert [(index, reused) for index, _, reused in ended] == [(0, True), (1, True), (2, False)]
    assert list(execute(specs, tmp_path, **options))[2][1] == ended[2][1]


def test_a_result_of_another_format_is_made_again(tmp_path: Path, raw: dict[str, Any]) -> None:
    store = ResultStore(tmp_path)
    (spec,) = plan(raw, seeds=[0], baselines=[])
    store.put("d", spec, result("clusters", 2.0))
    assert store.get("d") == result("clusters", 2.0)
    (tmp_path / "runs" / "d.json").write_text('{"loss": 1}')
    assert store.get("d") is None
