import argparse
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dsx.cli import prepare, tokenizer
from dsx.data.tokenizer import encode_documents
from dsx.errors import DataError, ModelError
from tests.data.conftest import document
from tests.tiny_settings import tiny_settings


def train(*words: str) -> int:
    parser = argparse.ArgumentParser()
    tokenizer.add_arguments(parser)
    return tokenizer.run(parser.parse_args(["train", *words]))


def test_tokenizer_train_writes_an_hf_folder_and_says_how_well_it_packs(
    jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--input", jsonl.name, "--vocab-size", "290", "--output", "out/small")
    assert train(*command, "--cache-dir", "cache") == 0
    loaded = AutoTokenizer.from_pretrained("out/small")
    assert len(loaded) == 290
    texts = [document(number) for number in range(40)]
    size = sum(len(text) for text in texts)
    tokens = sum(len(ids) for ids in encode_documents(loaded, texts, "small"))
    assert capsys.readouterr().out == (
        f"wrote out/small: 290 entries, trained on 40 documents, {size:,} bytes; "
        f"{size / tokens:.3f} bytes per token on them\n"
    )
    assert list(Path("cache").iterdir()) == []
    with pytest.raises(DataError, match="out/small exists already"):
        train(*command)


def prepare_with(jsonl: Path, tokenizer_folder: Path, *overrides: str) -> int:
    changes = {
        "dsx": {
            "data": {"heldout_fraction": 0.1, "cache_dir": "cache"},
            "tokenizer": str(tokenizer_folder),
        }
    }
    settings = tiny_settings(Path(), jsonl.name, changes)
    Path("settings.json").write_text(json.dumps(settings))
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = ["--deepspeed_config", "settings.json", "--set", "dsx.data.seq_len=32", *overrides]
    return prepare.run(parser.parse_args(words))


def test_prepare_prints_what_was_built_and_then_reused(
    jsonl: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_with(jsonl, tokenizer_folder) == 0
    built = capsys.readouterr().out
    assert built.startswith("built cache/prepared/")
    assert "train     36 documents, " in built
    assert " blocks of 32 tokens" in built
    assert " bytes per token; gzip -9 needs " in built
    assert prepare_with(jsonl, tokenizer_folder) == 0
    assert capsys.readouterr().out == built.replace("built", "reused", 1)


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("dsx.model.config.hiden_size=32", ModelError, "'hiden_size'.*'hidden_size'"),
        ("dsx.pipeline.stages=99", ModelError, "99"),
        ("dsx.model.config.vocab_size=270", DataError, "but the model's embedding only 270 rows"),
    ],
)
def test_a_wrong_model_is_found_before_anything_is_tokenized(
    jsonl: Path, tokenizer_folder: Path, override: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        prepare_with(jsonl, tokenizer_folder, override)
    assert not list(Path("cache").glob("prepared/*/manifest.json"))


def test_a_vocabulary_to_be_trained_has_to_fit_the_model(
    jsonl: Path, tokenizer_folder: Path
) -> None:
    with pytest.raises(DataError, match="has 301 entries, but the model's embedding only 300"):
        prepare_with(jsonl, tokenizer_folder, 'dsx.tokenizer={"vocab_size": 301}')
    assert not Path("cache").exists()
