"""A small valid settings file to change in one place."""

import copy
import json
from pathlib import Path
from typing import Any

_VALID: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "dsx": {
        "name": "tiny",
        "run_dir": "runs/tiny",
        "model": {"config": {"model_type": "llama", "hidden_size": 64}},
        "pipeline": {"stages": 2},
        "tokenizer": "tokenizer/tiny",
        "training": {"steps": 100, "schedule": {"warmup_steps": 10}},
        "outer": {"local_steps": 20},
    },
}
REMOVED = object()
"""As a value of `changed`: the key is left out."""


def valid() -> dict[str, Any]:
    """The parsed JSON of a file that loads, to be changed at will."""
    return copy.deepcopy(_VALID)


def changed(**values: Any) -> dict[str, Any]:
    """The valid file with other values at dotted keys; `REMOVED` takes a key away."""
    raw = valid()
    for dotted, value in values.items():
        *path, key = dotted.split(".")
        here = raw
        for name in path:
            here = here.setdefault(name, {})
        if value is REMOVED:
            del here[key]
        else:
            here[key] = value
    return raw


def written(folder: Path, raw: Any) -> Path:
    """`raw` (JSON text, or anything that JSON can hold) as a file in `folder`."""
    path = folder / "settings.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
    return path
