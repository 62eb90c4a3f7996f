"""Settings of runs that are over in a second."""

from pathlib import Path
from typing import Any

from tests.tiny_settings import tiny_settings

STEPS = 36


def write_corpus(folder: Path) -> Path:
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "mu",
    ]
    for number in range(30):
        picks = [words[(number * 7 + at * (number % 5 + 1)) % len(words)] for at in range(60)]
        (folder / f"{number:02}.txt").write_text(f"document {number}: {' '.join(picks)}.\n")
    return folder


def raw_settings(
    folder: Path,
    run: str,
    *,
    stages: int = 1,
    replicas: int = 1,
    bf16: bool = False,
    tied: bool = False,
    outer: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """A run in `folder / run`; `replicas` only says how the batch is cut."""
    return tiny_settings(
        folder,
        str(folder / "corpus" / "*.txt"),
        {
            "gradient_accumulation_steps": 4 // replicas,
            "bf16": {"enabled": bf16},
            "dsx": {
                "name": "plain" if outer is None else "outer",
                "run_dir": str(folder / run),
                "model": {"config": {"tie_word_embeddings": tied}},
                "pipeline": {"stages": stages},
                "training": {"steps": steps, "eval_every": 10, "eval_batches": 2},
                "outer": {"local_steps": 5, "timeout_seconds": 60.0} | (outer or {}),
                "checkpoint": {"every_rounds": 2, "keep": 2},
            },
        },
    )
