"""The settings file of a plan."""

import copy
import json
from pathlib import Path
from typing import Any

from dsx.planning.plan import Plan
from dsx.settings.loading import parse_settings


def planned_settings(raw: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """`raw` (a whole settings file) with the plan's layout and outer settings; checked.

    Raises:
        SettingsError: the result is no sound settings file.
    """
    out = copy.deepcopy(raw)
    layout, outer = plan.chosen.layout, plan.outer.settings
    out["train_micro_batch_size_per_gpu"] = layout.micro_batch
    out["gradient_accumulation_steps"] = layout.micro_batches
    out["train_batch_size"] = layout.sequences
    pipeline = out["dsx"].setdefault("pipeline", {})
    if isinstance(pipeline.get("partition"), list) and pipeline.get("stages") != layout.stages:
        del pipeline["partition"]
    pipeline["stages"] = layout.stages
    pipeline["activation_checkpointing"] = layout.checkpointing
    block = out["dsx"].setdefault("outer", {})
    block.update(
        local_steps=outer.local_steps,
        delay=outer.delay,
        own_share=outer.own_share,
        own_residual=outer.own_residual,
        lr=outer.lr,
        momentum=outer.momentum,
        momentum_warmup_steps=outer.momentum_warmup_steps,
        start_clusters=plan.request.clusters,
        timeout_seconds=max(outer.timeout_seconds, 3 * plan.outer.exchange_seconds),
        compression=outer.compression.model_dump(mode="json"),
    )
    parse_settings(out, source="the planned settings")
    return out


def write_settings(path: Path, raw: dict[str, Any], plan: Plan) -> None:
    """Write `planned_settings` to a new file. Raises FileExistsError where it is not new."""
    text = json.dumps(planned_settings(raw, plan), indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
