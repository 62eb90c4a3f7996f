"""What a simulated run gives, kept as one JSON file each so that a sweep can go on."""

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dsx.simulation.spec import Kind, RunSpec


class Point(BaseModel):
    """One evaluation of the shared weights."""

    model_config = ConfigDict(extra="forbid")

    step: int
    tokens: int
    """Trained so far by all clusters together."""
    bytes: float
    """Sent so far by one cluster."""
    loss: float
    """Held out, nats per token."""


class RunResult(BaseModel):
    """The outcome of one run. Bytes are those that one cluster sends, averaged over clusters."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    seed: int
    clusters: int
    parameters: int
    steps: int
    tokens: int
    loss: float
    """Held-out loss of the shared weights after everything was exchanged, nats per token."""
    bytes_per_step: float
    fewer_bytes: float | None
    """Per-step fp32 ring all-reduce's bytes over these; None where nothing is sent."""
    rounds: int
    bytes_per_round: float
    local_steps: int
    delay: int
    step_seconds: float
    """Median of one cluster's inner step on this machine."""
    wall_seconds: float
    """That the whole run took here, all clusters one after the other."""
    curve: list[Point]


class ResultStore:
    """Results in `FOLDER/runs/DIGEST.json`; a finished run is never made twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "runs"

    def get(self, digest: str) -> RunResult | None:
        """A finished run's result. A file of another format counts as absent."""
        try:
            return RunResult.model_validate_json(self._path(digest).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def put(self, digest: str, spec: RunSpec, result: RunResult) -> None:
        """Keep a result, whole or not at all, with the settings it came from beside it."""
        self._write(self._path(digest), result.model_dump_json(indent=1))
        self._write(self._path(digest).with_suffix(".spec.json"), spec.model_dump_json(indent=1))

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
