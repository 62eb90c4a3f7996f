"""The settings of runs that are over in seconds, for tests of whichever package; a test changes
what it is about."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 300

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""A model config of about 20 thousand parameters."""


def tiny_settings(folder: Path, source: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A whole settings file, as parsed JSON.

    Args:
        folder: the run and the prepared data are put below it.
        source: of the corpus.
        changes: a tree of what is to be otherwise; it joins the tree that is there, key by key.
    """
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "dsx": {
            "name": "tiny",
            "run_dir": str(folder / "run"),
            "model": {"config": copy.deepcopy(LLAMA)},
            "data": {
                "source": source,
                "seq_len": 16,
                "heldout_fraction": 0.2,
                "cache_dir": str(folder / "cache"),
            },
            "tokenizer": {"vocab_size": VOCABULARY},
            "training": {"steps": 1},
            # Any exchange is long beside so short a step; tests count rounds of a set length.
            "outer": {"adapt": {"local_steps": "fixed"}},
            "tracking": {"wandb": False},
        },
    }
    _join(raw, changes)
    return raw


def _join(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _join(tree[key], value)
        else:
            tree[key] = copy.deepcopy(value)
