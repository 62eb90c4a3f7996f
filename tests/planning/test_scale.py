"""The points of the figure of many clusters, for whatever settings file it is drawn."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsx.cli.common import PICTURES
from dsx.cli.main import main
from dsx.errors import PlanError
from dsx.planning import scale
from dsx.planning.hardware import read_gpu
from dsx.planning.scale import Scenario

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.json"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that are planned at once, on one number of clusters and one link."""
    raw: dict[str, Any] = json.loads(CONFIG.read_text())
    gpu = read_gpu("memory=8gb,tflops=1")
    both = (Scenario("other", raw["dsx"]["model"]["config"], 6, gpu), Scenario("own", None, 4, gpu))
    monkeypatch.setattr(scale, "scenarios", lambda own: both)
    monkeypatch.setattr(scale, "points", partial(scale.points, clusters=(2,), rates=(1e8,)))


def test_a_settings_file_without_a_batch_is_drawn_with_that_of_its_own_layout() -> None:
    raw = json.loads(CONFIG.read_text())
    assert "train_batch_size" not in raw
    other, own = scale.points(raw)
    assert other.plan is not None
    assert own.plan is not None
    # Two stages of 2 x 2 sequences, on six and on four GPUs.
    assert other.plan.chosen.layout.sequences == 12
    assert own.plan.chosen.layout.sequences == 8


def test_a_batch_that_does_not_divide_by_the_gpus_grows_until_it_does() -> None:
    raw = json.loads(CONFIG.read_text()) | {"train_batch_size": 8}
    other, own = scale.points(raw)
    assert other.plan is not None
    assert own.plan is not None
    assert other.plan.chosen.layout.sequences == 12
    assert own.plan.chosen.layout.sequences == 8


def test_a_model_that_does_not_fit_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Scenario("too large", None, 4, read_gpu("memory=0.1gb,tflops=1"))
    monkeypatch.setattr(scale, "scenarios", lambda own: (large,))
    with pytest.raises(PlanError, match=r"^too large: no layout fits"):
        scale.points(json.loads(CONFIG.read_text()))


@pytest.mark.parametrize("ending", [*PICTURES, ".PNG"])
def test_a_figure_is_drawn_in_every_format_that_a_name_may_end_in(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / f"figure{ending}"
    assert main(["plan", "--deepspeed_config", str(CONFIG), "--figure", str(picture)]) == 0
    assert f"wrote {picture}" in capsys.readouterr().out
    begins = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    assert picture.read_bytes().startswith(begins[ending.lower()])
