from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.data.prepare import prepare
from dsx.data.prepared import PreparedData
from dsx.settings.loading import apply_override
from dsx.simulation.result import RunResult
from dsx.simulation.run import make_run
from dsx.simulation.spec import RunSpec
from tests.simulation.tiny import settings_json, write_corpus


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("simulation")
    (folder / "text").mkdir()
    return settings_json(folder, write_corpus(folder / "text"))


@pytest.fixture(scope="session")
def data(raw: dict[str, Any]) -> PreparedData:
    return prepare(RunSpec(kind="single", raw=raw, clusters=1).settings())


MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="session")
def spec(raw: dict[str, Any]) -> MakeSpec:
    """`spec(kind, clusters, *overrides)`."""
    import copy

    def make(kind: Any, clusters: int, *overrides: str, **options: Any) -> RunSpec:
        changed = copy.deepcopy(raw)
        for override in overrides:
            apply_override(changed, override)
        return RunSpec(kind=kind, raw=changed, clusters=clusters, **options)

    return make


@pytest.fixture(scope="session")
def simulate(spec: MakeSpec, data: PreparedData) -> Callable[..., RunResult]:
    """`simulate(kind, clusters, *overrides)`: makes the run."""

    def make(kind: Any, clusters: int, *overrides: str, **options: Any) -> RunResult:
        return make_run(spec(kind, clusters, *overrides, **options), data, torch.device("cpu"))

    return make
