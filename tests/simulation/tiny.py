"""A run of seconds: a few thousand parameters on a corpus of made-up text."""

import random
from pathlib import Path
from typing import Any

from tests.tiny_settings import tiny_settings

WORDS = ("def", "return", "import", "while", "lambda", "yield", "class", "assert", "raise", "with")


def write_corpus(folder: Path) -> str:
    """Files of random words; returns their glob."""
    generator = random.Random(0)
    for number in range(12):
        text = " ".join(generator.choice(WORDS) for _ in range(1500))
        (folder / f"{number}.txt").write_text(text)
    return str(folder / "*.txt")


def settings_json(folder: Path, corpus: str) -> dict[str, Any]:
    """A whole settings file: a Llama of width 16 and one layer, 12 steps."""
    return tiny_settings(
        folder,
        corpus,
        {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"params": {"weight_decay": 0.1}},
            "dsx": {
                "model": {
                    "config": {
                        "intermediate_size": 16,
                        "num_hidden_layers": 1,
                        "max_position_embeddings": 16,
                        "tie_word_embeddings": False,
                    }
                },
                "data": {"heldout_fraction": 0.1},
                "training": {
                    "steps": 12,
                    "schedule": {"warmup_steps": 2},
                    "eval_every": 6,
                    "eval_batches": 4,
                },
                "outer": {
                    "local_steps": 3,
                    "delay": 1,
                    "compression": {"matrices": "none", "embeddings": "none", "vectors": "none"},
                },
            },
        },
    )
