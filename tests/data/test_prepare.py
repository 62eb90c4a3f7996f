import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from dsx.data import build as builder
from dsx.data.compressed import gzip_bits_per_byte
from dsx.data.prepare import prepare, prepare_data
from dsx.data.prepared import PreparedData
from dsx.data.split import document_hash
from dsx.errors import DataError
from dsx.settings.dsx_block import DataSettings, TrainTokenizer
from tests.data.conftest import document

Make = Callable[..., DataSettings]
DOCUMENTS = [document(number) for number in range(40)]
# A tenth of forty documents.
HELD = sorted(DOCUMENTS, key=document_hash)[:4]


def documents_of(data: PreparedData, split: str) -> list[str]:
    """The texts that the shards of a split hold, cut at EOS."""
    tokenizer = AutoTokenizer.from_pretrained(str(data.tokenizer_folder))
    stream = getattr(data, split).stream
    ids = stream.read(0, len(stream)).tolist()
    assert ids[-1] == data.eos_token_id
    found: list[list[int]] = [[]]
    for token in ids:
        if token == data.eos_token_id:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(part) for part in found[:-1]]


def test_the_shards_hold_every_document_once_in_order_each_ended_by_eos(
    data_settings: Make, tokenizer_folder: Path
) -> None:
    data = prepare_data(data_settings(), str(tokenizer_folder))
    assert not data.reused
    assert documents_of(data, "train") == [text for text in DOCUMENTS if text not in HELD]
    assert documents_of(data, "heldout") == [text for text in DOCUMENTS if text in HELD]
    assert (data.train_documents, data.heldout_documents) == (36, 4)
    assert (data.vocab_size, data.eos_token_id) == (300, 0)
    assert data.train.seq_len == 16
    assert len(data.train) == (data.train.token_count - 1) // 16


def test_the_measures_of_the_held_out_text_are_those_of_its_bytes(
    data_settings: Make, tokenizer_folder: Path
) -> None:
    data = prepare_data(data_settings(), str(tokenizer_folder))
    held = [text for text in DOCUMENTS if text in HELD]
    size = sum(len(text.encode()) for text in held)
    assert data.heldout_bytes == size
    assert data.train_bytes == sum(len(text.encode()) for text in DOCUMENTS) - size
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in held)
    assert data.heldout.token_count == tokens
    assert math.isclose(data.heldout_bytes_per_token, size / tokens)
    by_file, by_stream = gzip_bits_per_byte(held)
    assert data.heldout_gzip_bits_per_byte == by_file
    assert data.heldout_gzip_stream_bits_per_byte == by_stream


def test_a_second_call_reuses_without_building(
    data_settings: Make, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_data(data_settings(), str(tokenizer_folder))

    def build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(builder, "build", build)
    second = prepare_data(data_settings(), str(tokenizer_folder))
    assert second.reused
    assert (second.digest, second.folder) == (first.digest, first.folder)
    assert second.heldout_bytes_per_token == first.heldout_bytes_per_token
    # The length of a block is decided on reading.
    longer = prepare_data(data_settings(seq_len=32), str(tokenizer_folder))
    assert longer.reused
    assert longer.train[1].tolist() == first.train.stream.read(32, 65).tolist()
    with pytest.raises(AssertionError, match="built again"):
        prepare_data(data_settings(heldout_fraction=0.2), str(tokenizer_folder))


def test_a_changed_input_rebuilds_the_shards(
    data_settings: Make, tokenizer_folder: Path, jsonl: Path, tmp_path: Path
) -> None:
    first = prepare_data(data_settings(), str(tokenizer_folder))
    # Same length, same modification time: only the content tells.
    before = jsonl.stat()
    jsonl.write_text(jsonl.read_text().replace("document 7:", "document X:"))
    os.utime(jsonl, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepare_data(data_settings(), str(tokenizer_folder))
    assert not changed.reused
    assert changed.digest != first.digest
    texts = documents_of(changed, "train") + documents_of(changed, "heldout")
    assert any(text.startswith("document X:") for text in texts)

    other = tmp_path / "other-tokenizer"
    shutil.copytree(tokenizer_folder, other)
    assert prepare_data(data_settings(), str(other)).digest == changed.digest
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "a"}))
    assert not prepare_data(data_settings(), str(other)).reused


def test_another_text_field_gives_other_data(
    data_settings: Make, tokenizer_folder: Path, jsonl: Path
) -> None:
    rows = [json.dumps({"text": text, "body": text.upper()}) for text in DOCUMENTS]
    jsonl.write_text("\n".join(rows))
    lower = prepare_data(data_settings(), str(tokenizer_folder))
    upper = prepare_data(data_settings(text_field="body"), str(tokenizer_folder))
    assert lower.digest != upper.digest
    assert documents_of(upper, "train")[0].startswith("DOCUMENT")


def test_a_tokenizer_is_trained_on_the_training_documents_alone(
    data_settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = builder.tokenizers.train_tokenizer

    def spy(texts: object, vocab_size: int) -> object:
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(builder.tokenizers, "train_tokenizer", spy)
    data = prepare_data(data_settings(), TrainTokenizer(vocab_size=280))
    assert seen == [text for text in DOCUMENTS if text not in HELD]
    assert data.vocab_size == len(AutoTokenizer.from_pretrained(str(data.tokenizer_folder))) == 280
    assert prepare_data(data_settings(), TrainTokenizer(vocab_size=280)).reused
    assert not prepare_data(data_settings(), TrainTokenizer(vocab_size=281)).reused


def test_nothing_but_the_result_is_left_in_the_cache(
    data_settings: Make, tokenizer_folder: Path, tmp_path: Path
) -> None:
    data = prepare_data(data_settings(), str(tokenizer_folder))
    prepared = tmp_path / "cache" / "prepared"
    assert sorted(path.name for path in prepared.iterdir()) == [
        data.digest,
        f"{data.digest}.lock",
    ]
    assert sorted(path.relative_to(data.folder).as_posix() for path in data.folder.rglob("*")) == [
        "heldout-00000.bin",
        "manifest.json",
        "tokenizer",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "train-00000.bin",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "corpus.jsonl"]


def test_a_failed_build_leaves_nothing_and_a_killed_ones_rest_is_cleared(
    data_settings: Make,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = tmp_path / "cache" / "prepared"
    with monkeypatch.context() as patch:
        patch.setattr(builder, "gzip_bits_per_byte", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_data(data_settings(), str(tokenizer_folder))
    (lock,) = prepared.iterdir()
    rest = prepared / f"{lock.stem}.building-killed"
    rest.mkdir()
    (rest / "train-00000.bin").write_bytes(b"half")
    assert not prepare_data(data_settings(), str(tokenizer_folder)).reused
    assert not rest.exists()


def test_a_corpus_that_changes_while_it_is_prepared_is_refused(
    data_settings: Make, tokenizer_folder: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = builder.gzip_bits_per_byte

    def change(texts: object) -> tuple[float, float]:
        jsonl.write_text(jsonl.read_text() + '{"text": "late"}\n')
        return measure(texts)

    monkeypatch.setattr(builder, "gzip_bits_per_byte", change)
    with pytest.raises(DataError, match="changed while it was being prepared"):
        prepare_data(data_settings(), str(tokenizer_folder))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00000.bin", flip, "train-00000.bin has SHA-256"),
        ("train-00000.bin", lambda file: os.truncate(file, 100), "has 100 bytes instead of"),
        ("heldout-00000.bin", Path.unlink, "heldout-00000.bin is missing"),
        ("tokenizer/tokenizer.json", flip, "tokenizer.json has SHA-256"),
        ("manifest.json", Path.unlink, "manifest.json can't be read"),
        ("manifest.json", lambda file: os.truncate(file, 50), "manifest.json can't be read"),
    ],
)
def test_damaged_data_is_told_with_the_file_and_the_way_out(
    data_settings: Make,
    tokenizer_folder: Path,
    name: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    data = prepare_data(data_settings(), str(tokenizer_folder))
    damage(data.folder / name)
    with pytest.raises(DataError, match=rf"{message}.*delete the folder .*dsx prepare"):
        prepare_data(data_settings(), str(tokenizer_folder))
    shutil.rmtree(data.folder)
    assert not prepare_data(data_settings(), str(tokenizer_folder)).reused


def test_a_folder_of_other_data_is_not_taken_for_the_right_one(
    data_settings: Make, tokenizer_folder: Path
) -> None:
    one = prepare_data(data_settings(), str(tokenizer_folder))
    two = prepare_data(data_settings(heldout_fraction=0.2), str(tokenizer_folder))
    shutil.rmtree(one.folder)
    two.folder.rename(one.folder)
    with pytest.raises(DataError, match=f"is of data {two.digest} in format 1"):
        prepare_data(data_settings(), str(tokenizer_folder))


def test_a_corpus_too_small_for_one_block_names_the_numbers(
    data_settings: Make, tokenizer_folder: Path
) -> None:
    with pytest.raises(DataError, match=r"train text has \d{4} tokens.*needs 5001; .*more text$"):
        prepare_data(data_settings(seq_len=5000), str(tokenizer_folder))
    with pytest.raises(DataError, match=r"heldout text has \d{3} tokens.*needs 1001; .*fraction$"):
        prepare_data(data_settings(seq_len=1000), str(tokenizer_folder))


def test_prepare_takes_the_whole_settings(data_settings: Make, tokenizer_folder: Path) -> None:
    settings = SimpleNamespace(
        dsx=SimpleNamespace(data=data_settings(), tokenizer=str(tokenizer_folder))
    )
    expected = prepare_data(data_settings(), str(tokenizer_folder))
    assert prepare(settings).digest == expected.digest


RANK = """
import json, sys
from dsx.data.prepare import prepare_data
from dsx.settings.dsx_block import DataSettings, TrainTokenizer
import dsx.data.build
print("ready", flush=True)
sys.stdin.readline()
data = prepare_data(DataSettings.model_validate_json(sys.argv[1]), TrainTokenizer(vocab_size=280))
print(json.dumps([data.reused, data.digest, data.train[3].tolist()]))
"""


@pytest.mark.multiprocess
def test_several_ranks_at_once_make_one_build(data_settings: Make) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, data_settings().model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(3)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    results = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        assert err == ""
        results.append(json.loads(out))
    assert sorted(reused for reused, _, _ in results) == [False, True, True]
    assert len({json.dumps(rest) for _, *rest in results}) == 1
