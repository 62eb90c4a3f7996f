"""Everything that can be refused before training starts, and what was read to find that out."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.data.prepare import prepare
from dsx.data.prepared import PreparedData
from dsx.errors import LaunchError, ModelError
from dsx.models.config import load_config
from dsx.models.partition import StageRange
from dsx.models.plan import ModelPlan
from dsx.models.self_check import self_check
from dsx.settings import Settings, check_layout


@dataclass(frozen=True)
class Preflight:
    """A run that can start."""

    plan: ModelPlan
    stages: list[StageRange]
    replicas: int
    data: PreparedData

    @property
    def model_size(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return sum(shape.numel() for shape in self.plan.parameter_shapes.values())


def plan_model(settings: Settings) -> tuple[ModelPlan, list[StageRange]]:
    """The model and its stages, as far as settings alone can tell whether they are possible.

    Raises:
        DsxError: naming the value, the limit and the way out.
    """
    plan = ModelPlan(load_config(settings.dsx.model))
    pipeline = settings.dsx.pipeline
    stages = plan.partition(pipeline.stages, pipeline.partition)
    longest = plan.max_positions
    if longest is not None and settings.dsx.data.seq_len > longest:
        raise ModelError(
            f"dsx.data.seq_len is {settings.dsx.data.seq_len}, but the model has learned positions "
            f"for {longest} tokens only: set seq_len to at most {longest}, or give the model more "
            "in dsx.model.config"
        )
    return plan, stages


def preflight(settings: Settings, processes: int, check_split: bool = True) -> Preflight:
    """Check a run on `processes` ranks per cluster; prepares the data where that isn't done yet.

    Args:
        check_split: also run a shrunken model split and unsplit (seconds; once per cluster).

    Raises:
        DsxError: naming the value, the limit and the way out.
    """
    replicas = check_layout(settings, processes)
    require_writable(settings.dsx.run_dir)
    plan, stages = plan_model(settings)
    data = prepare(settings, plan.vocab_size)
    given = settings.dsx.model.config
    if given is not None and "eos_token_id" not in given:
        # What ends a document in this data, for whoever generates with the exported model.
        plan.config.eos_token_id = data.eos_token_id
    if check_split:
        self_check(plan.config)
    return Preflight(plan, stages, replicas, data)


def require_writable(run_dir: str) -> None:
    """Raise LaunchError unless a run can write there.

    Leaves no folder behind: what comes after may be refused, too.
    """
    there = Path(run_dir).absolute()
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise LaunchError(
            f"dsx.run_dir is {run_dir!r}, where nothing can be written ({error.strerror}: "
            f"{error.filename}); choose another folder, or make this one writable"
        ) from error


def run_identity(settings: Settings, ready: Preflight) -> dict[str, object]:
    """All that clusters of one run must have in common, by name.

    Left out is what may differ from site to site: folders, tracking, checkpoints, the split into
    stages (the shapes of an outer group are compared on their own).
    """
    everything = settings.model_dump(mode="json")
    dsx = everything["dsx"]
    for key in ("run_dir", "tracking", "checkpoint", "pipeline"):
        del dsx[key]
    del dsx["data"]["cache_dir"]
    del dsx["data"]["source"]
    del dsx["tokenizer"]
    del dsx["model"]["path"]
    return {
        **_flat(everything),
        **{f"the model's {key}": v for key, v in ready.plan.config.to_diff_dict().items()},
        "prepared data": ready.data.digest,
        "replicas": ready.replicas,
    }


def _flat(block: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in block.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat
