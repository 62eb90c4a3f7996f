"""Corpora and tokenizers small enough to be made for every test."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsx.data.tokenizer import save_tokenizer, train_tokenizer
from dsx.settings.dsx_block import DataSettings

WORDS = [
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


def document(number: int) -> str:
    """A text of some 30 words, different for every number."""
    picks = [WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(30)]
    return f"document {number}: {' '.join(picks)}.\n"


@pytest.fixture(autouse=True)
def _offline_and_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 entries."""
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    save_tokenizer(train_tokenizer((document(number) for number in range(40)), 300), folder)
    return folder


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """Forty documents, one JSON object per line."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": document(n), "n": n}) + "\n" for n in range(40)))
    return file


@pytest.fixture
def data_settings(jsonl: Path, tmp_path: Path) -> Callable[..., DataSettings]:
    """Settings over the forty documents, with changes by keyword."""

    def make(**changes: object) -> DataSettings:
        given = {
            "source": str(jsonl),
            "seq_len": 16,
            "heldout_fraction": 0.1,
            "cache_dir": str(tmp_path / "cache"),
        }
        return DataSettings.model_validate(given | changes)

    return make
