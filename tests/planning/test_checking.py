"""What sets a plan beside reality: the dry run of a layer, the validation, the figure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsx.cli.main import main
from dsx.errors import ModelError, SettingsError
from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.planning.dry_run import dry_run
from dsx.planning.figure import draw
from dsx.planning.hardware import read_gpu
from dsx.planning.memory import CPU_TEMPORARIES, GPU_TEMPORARIES, DeviceMemory, stepping
from dsx.planning.plan import Planner, Request
from dsx.planning.scale import Point, Scenario, as_rows
from dsx.planning.time import Link
from dsx.planning.validate import FRAME, GLOO_SHARE, Check, checks
from dsx.settings import Settings, load_settings
from dsx.settings.deepspeed_keys import Bf16

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.json"


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings(CONFIG)


def test_a_dry_run_sends_the_bytes_of_the_plan(settings: Settings) -> None:
    plan = ModelPlan(load_config(settings.dsx.model))
    found = dry_run(settings, plan, 2, 0)
    layer = plan.parameter_counts().layers[0]
    assert found.layer_parameters == layer
    assert found.stage_parameters > layer
    assert found.message_bytes == found.planned_bytes
    assert min(found.encode_seconds, found.decode_seconds, found.outer_step_seconds) > 0
    with pytest.raises(SettingsError, match="has 0 to 1"):
        dry_run(settings, plan, 2, 2)


def test_a_stage_that_is_not_the_models_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ModelPlan(load_config(settings.dsx.model))
    name = next(n for n in plan.parameter_shapes if "layers.0." in n)
    monkeypatch.delitem(plan.parameter_shapes, name)
    with pytest.raises(ModelError, match=f"lacks {name}"):
        dry_run(settings, plan, 2, 0)


def measured(file: Path, *, rate: float = 1e6) -> dict[str, Any]:
    """As `dsx bench link` tells: two clusters that need a second for a step, in the mean."""
    tokens = 2 * 2 * 2 * 256
    common = {"rate": rate, "peak_rank_bytes": {"c0/0": 900e6}, "local_steps": None}
    none = {"method": "none", "tokens_per_second": tokens, **common}
    slow = {"method": "allreduce", "tokens_per_second": tokens / 60, "utilization": 1 / 60}
    slow |= {"sent_bytes_per_token": 2 * 7e6 / tokens, **common}
    late = {"method": "dsx", "tokens_per_second": tokens / 1.5, "utilization": 2 / 3, **common}
    late |= {"sent_bytes_per_token": 40.0, "measured_rounds": 4, "measured_steps": 46}
    run = {"rate": "1mbit", "clusters": 2, "overrides": [], "rows": []}
    first, second = ({**none, "tokens_per_second": part * tokens} for part in (0.9, 1.1))
    run["rows"] = [first, late, second, slow]
    large = {**run, "overrides": ["dsx.model.config.hidden_size=384"]}
    large["rows"] = [none, {**none, "method": "dsx"}]
    return {"config": str(file), "cores": 4, "floor_bytes": 400e6, "runs": [run], "memory": [large]}


def test_the_validation_computes_what_it_compares(settings: Settings) -> None:
    found = {(c.method, c.what): c for c in checks(measured(CONFIG))}
    parameters = ModelPlan(load_config(settings.dsx.model)).parameter_counts().total
    sent = found["allreduce", "bytes a token"]
    # Of fp32: gradients in a ring, and half of the weights to the other cluster.
    payload = (4 + 2) * parameters * FRAME
    assert sent.predicted == pytest.approx(2 * payload / 2048)
    step = found["allreduce", "step seconds"]
    assert step.measured == pytest.approx(60.0)
    assert step.predicted == pytest.approx(1 + 8 * payload / (GLOO_SHARE * 1e6))
    assert found["allreduce", "utilization"].predicted == pytest.approx(1 / step.predicted)
    # In rounds of 11.5 steps the outer engines of both clusters work on the four cores.
    step = found["dsx", "step seconds"]
    assert step.measured == pytest.approx(1.5)
    assert 0.06 * parameters * 1e-6 / 2 / 11.5 < step.predicted - 1 < 0.2
    assert found["dsx", "bytes a token"].predicted * 11.5 * 1024 < 0.03 * payload
    assert found["dsx", "largest rank"].predicted > found["none", "largest rank"].predicted > 400e6


@pytest.mark.parametrize("bf16", [False, True])
def test_what_a_step_needs_at_its_end_counts_where_it_is_more_than_micro_batches_need(
    settings: Settings, bf16: bool
) -> None:
    """Of two replicas: the share is half of the gradients."""
    settings = settings.model_copy(update={"bf16": Bf16(enabled=bf16)})
    gradients = 4.0 * 1000
    assert stepping(settings, 1000, 2, GPU_TEMPORARIES) == gradients * (0.5 if bf16 else 1.5)
    assert stepping(settings, 1000, 2, CPU_TEMPORARIES) == gradients * (1.0 if bf16 else 1.5)
    held = {"weights": 1.0, "gradients": 2.0, "optimizer": 3.0}
    assert DeviceMemory(**held, activations=4, working=5, stepping=10).total == 16
    assert DeviceMemory(**held, activations=4, working=7, stepping=10).total == 17


def test_a_prediction_outside_of_its_bound_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(measured(CONFIG)))
    words = ["plan", "--deepspeed_config", str(CONFIG), "--validate", "--from", str(file)]
    assert main(words) == 1
    assert "MISSED" in capsys.readouterr().out

    file.write_text("{}")
    assert main(words) == 2
    assert "not what" in capsys.readouterr().err


def test_a_check_holds_within_its_bound_on_both_sides() -> None:
    def check(predicted: float) -> Check:
        return Check("2M", "1mbit", "dsx", "bytes", predicted, 100.0, 0.05)

    assert [check(value).holds for value in (94, 96, 104, 106)] == [False, True, True, False]
    assert check(96).error == pytest.approx(-0.04)


def test_the_figure_has_a_line_for_every_method(settings: Settings, tmp_path: Path) -> None:
    gpu = read_gpu("memory=8gb,tflops=1")
    planner = Planner(settings)

    def points() -> Iterator[Point]:
        for clusters in (2, 8, 64):
            for rate in (1e6, 1e8):
                request = Request(settings, clusters, 2, gpu, Link(rate, 0.01), as_set=True)
                yield Point(Scenario("tiny", None, 2, gpu), clusters, rate, planner.plan(request))

    found = list(points())
    draw(found, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count("<path") > 50
    rows = as_rows(found)
    assert [row["clusters"] for row in rows] == [2, 2, 8, 8, 64, 64]
    assert rows[0]["over_allreduce"] > rows[1]["over_allreduce"]
    assert as_rows([Point(found[0].scenario, 2, 1e3, None)])[0]["utilization"] is None
