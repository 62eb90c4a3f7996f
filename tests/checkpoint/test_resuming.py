"""What a checkpoint must have in common with the run that goes on from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.folders import Checkpoint, open_checkpoint
from dsx.checkpoint.generators import generator_states, restore_generators, seed_generators
from dsx.checkpoint.manifest import DataPosition, Layout
from dsx.errors import CheckpointError
from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.settings import Settings, parse_settings
from dsx.training.preflight import Preflight
from dsx.training.resuming import changed_settings, require_fit
from tests.checkpoint.made_up import manifest, writer
from tests.checkpoint.settings import raw_settings

MOMENTS = ("exp_avg", "exp_avg_sq")


class Data:
    digest = "d"


def preflight(settings: Settings, replicas: int = 1) -> Preflight:
    plan = ModelPlan(load_config(settings.dsx.model))
    stages = plan.partition(settings.dsx.pipeline.stages)
    return Preflight(plan, stages, replicas, Data())  # type: ignore[arg-type]


def saved(folder: Path, settings: Settings, shared: bool = False, **changes: Any) -> Checkpoint:
    """A checkpoint of the model that `settings` name, all zeros."""
    from dsx.checkpoint.writer import Job, SharedPart

    ready = preflight(settings)
    masters = {
        f"master/{name}": torch.zeros(shape) for name, shape in ready.plan.parameter_shapes.items()
    }
    fields = {
        "moments": list(MOMENTS),
        "settings": settings.model_dump(mode="json"),
        "model": ready.plan.config.to_dict(),
        "shared": "round-000001-00" if shared else None,
    }
    part = SharedPart("round-000001-00", {"round": 1}, {}) if shared else None
    made = writer(folder)
    made.start(Job(manifest(**(fields | changes)), masters, part))
    path = made.wait()
    assert path is not None
    return open_checkpoint(path)


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    return raw_settings(tmp_path, "run")


def test_the_same_model_data_and_optimizer_fit_in_any_layout(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    settings = parse_settings(raw)
    checkpoint = saved(tmp_path, settings, layout=Layout(stages=2, replicas=3))
    require_fit(checkpoint, preflight(settings), MOMENTS, with_clusters=False)


def test_another_model_is_named_by_a_tensor(tmp_path: Path, raw: dict[str, Any]) -> None:
    checkpoint = saved(tmp_path, parse_settings(raw))
    raw["dsx"]["model"]["config"]["hidden_size"] = 32
    with pytest.raises(CheckpointError, match=r"another model: .* \(300, 16\) there, \(300, 32\)"):
        require_fit(checkpoint, preflight(parse_settings(raw)), MOMENTS, with_clusters=False)
    raw["dsx"]["model"]["config"]["hidden_size"] = 16
    raw["dsx"]["model"]["config"]["num_hidden_layers"] = 5
    with pytest.raises(CheckpointError, match="has shape no such tensor there"):
        require_fit(checkpoint, preflight(parse_settings(raw)), MOMENTS, with_clusters=False)


def test_other_data_is_refused(tmp_path: Path, raw: dict[str, Any]) -> None:
    position = DataPosition(digest="other")
    checkpoint = saved(tmp_path, parse_settings(raw), data=position)
    with pytest.raises(CheckpointError, match=r"other data \(digest other there, d here\)"):
        require_fit(checkpoint, preflight(parse_settings(raw)), MOMENTS, with_clusters=False)


def test_another_kind_of_optimizer_is_refused(tmp_path: Path, raw: dict[str, Any]) -> None:
    checkpoint = saved(tmp_path, parse_settings(raw))
    with pytest.raises(CheckpointError, match=r"\['exp_avg', 'exp_avg_sq'\], the optimizer here"):
        require_fit(
            checkpoint, preflight(parse_settings(raw)), ("momentum_buffer",), with_clusters=False
        )


def test_with_and_without_other_clusters_are_different_runs(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    settings = parse_settings(raw)
    plain = saved(tmp_path / "plain", settings)
    with pytest.raises(CheckpointError, match=r"trained without an exchange.*leave out --coord"):
        require_fit(plain, preflight(settings), MOMENTS, with_clusters=True)
    joined = saved(tmp_path / "joined", settings, shared=True)
    with pytest.raises(CheckpointError, match=r"trained with an exchange.*give --coordinator"):
        require_fit(joined, preflight(settings), MOMENTS, with_clusters=False)


def test_dropout_needs_as_many_ranks_as_before(tmp_path: Path, raw: dict[str, Any]) -> None:
    raw["dsx"]["model"]["config"]["attention_dropout"] = 0.1
    settings = parse_settings(raw)
    checkpoint = saved(tmp_path, settings, layout=Layout(stages=1, replicas=1))
    require_fit(checkpoint, preflight(settings), MOMENTS, with_clusters=False)
    with pytest.raises(CheckpointError, match=r"dropout \(attention_dropout 0\.1\).*use 1 ranks"):
        require_fit(checkpoint, preflight(settings, 2), MOMENTS, with_clusters=False)


def test_changed_settings_are_listed_those_of_the_place_apart(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    checkpoint = saved(tmp_path, parse_settings(raw))
    raw["optimizer"]["params"]["lr"] = 0.5
    raw["dsx"]["run_dir"] = "elsewhere"
    raw["dsx"]["checkpoint"]["keep"] = 7
    raw["dsx"]["pipeline"]["stages"] = 2
    assert changed_settings(checkpoint, parse_settings(raw)) == ["optimizer.params.lr: 0.01 -> 0.5"]


def test_random_numbers_go_on_where_they_were() -> None:
    import random

    import numpy as np

    seed_generators("some run")
    states = {name: state.clone() for name, state in generator_states().items()}
    seed_generators("another run")
    assert not torch.equal(states["torch"], generator_states()["torch"])
    seed_generators("some run")
    first = (torch.rand(3), random.random(), np.random.rand(), random.gauss(0, 1))
    restore_generators(states)
    second = (torch.rand(3), random.random(), np.random.rand(), random.gauss(0, 1))
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
