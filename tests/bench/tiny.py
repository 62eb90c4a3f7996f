"""A settings file of a model and a corpus that cost nothing."""

import json
from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def settings_file(folder: Path, **model: Any) -> Path:
    """Written into `folder`; `model` joins or changes keys of the model's config."""
    text = folder / "text"
    text.mkdir()
    for document in range(60):
        words = (f"document {document} says {document * line}" for line in range(40))
        (text / f"{document}.txt").write_text("\n".join(words))
    file = folder / "settings.json"
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "name": "bench",
            "run_dir": str(folder / "untouched"),
            "model": {"config": {**MODEL, **model}},
            "pipeline": {"stages": 2},
            "data": {
                "source": str(text / "*.txt"),
                "seq_len": 16,
                "heldout_fraction": 0.2,
                "cache_dir": str(folder / "cache"),
            },
            "tokenizer": {"vocab_size": 300},
            "training": {"steps": 4},
        },
    }
    file.write_text(json.dumps(settings))
    return file
