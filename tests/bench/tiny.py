"""A settings file of a model and a corpus that cost nothing, and a link that carries nothing."""

import json
from pathlib import Path
from typing import Any

from dsx.bench.link.watch import Watch
from tests.tiny_settings import tiny_settings


def settings_file(folder: Path, **model: Any) -> Path:
    """Written into `folder`; `model` joins or changes keys of the model's config."""
    text = folder / "text"
    text.mkdir()
    for document in range(60):
        words = (f"document {document} says {document * line}" for line in range(40))
        (text / f"{document}.txt").write_text("\n".join(words))
    file = folder / "settings.json"
    config = {"num_hidden_layers": 3, "tie_word_embeddings": False, **model}
    changes = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"params": {"lr": 1e-3}},
        "dsx": {
            "name": "bench",
            "run_dir": str(folder / "untouched"),
            "model": {"config": config},
            "pipeline": {"stages": 2},
            "training": {"steps": 4},
        },
    }
    settings = tiny_settings(folder, str(text / "*.txt"), changes)
    file.write_text(json.dumps(settings))
    return file


class NothingCounted(Watch):
    """Of a link that is not there."""

    def __init__(self) -> None:
        self.peaks = {}

    def sent(self, cluster: int, start: float, end: float) -> float:
        return 0.0

    received = sent
