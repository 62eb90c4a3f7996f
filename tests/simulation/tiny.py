"""A run of seconds: a few thousand parameters on a corpus of made-up text."""

import random
from pathlib import Path
from typing import Any

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
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "dsx": {
            "name": "tiny",
            "run_dir": str(folder / "run"),
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "vocab_size": 300,
                    "max_position_embeddings": 16,
                    "tie_word_embeddings": False,
                }
            },
            "data": {
                "source": corpus,
                "seq_len": 16,
                "heldout_fraction": 0.1,
                "cache_dir": str(folder / "cache"),
            },
            "tokenizer": {"vocab_size": 300},
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
    }
