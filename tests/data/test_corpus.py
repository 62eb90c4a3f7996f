import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dsx.data import corpus as corpora
from dsx.data.corpus import FileCorpus, HubCorpus, find_corpus
from dsx.data.digests import FileDigests
from dsx.data.stdlib import stdlib_files
from dsx.errors import DataError


def texts(source: str | list[str], text_field: str = "text") -> list[str]:
    scratch = Path("scratch")
    scratch.mkdir(exist_ok=True)
    found = find_corpus(source, text_field, Path("hub")).documents(scratch)
    assert found.column_names == ["text"]
    return list(found["text"])


def digest(source: str | list[str]) -> str:
    return find_corpus(source, "text", Path("hub")).digest(FileDigests(Path("memo.json")))


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("first\r\nnaïve\n\n".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.md").write_bytes(b"third")
    assert texts(["a.txt", "b.txt", "c.md"]) == ["first\r\nnaïve\n\n", "third"]


def test_files_without_any_text_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    assert texts("a.txt") == []


def test_globs_are_sorted_and_reach_into_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        file = tmp_path / "in" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (tmp_path / "in" / "d.other").write_text("d")
    assert texts("in/**/*.txt") == ["a", "b", "deep/c"]
    assert texts(["in/b.txt", "in/*.txt"]) == ["b", "a"]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text("brackets")
    (tmp_path / "part1.txt").write_text("plain")
    assert texts("part[1].txt") == ["brackets"]


def test_jsonl_lines_may_differ_in_their_other_keys(tmp_path: Path) -> None:
    rows = [{"body": "one", "n": 1}, {"n": {"x": []}, "body": "two\n"}, {"body": ""}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert texts("a.jsonl", "body") == ["one", "two\n"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    table = pa.table({"body": ["one", None, "", "naïve"], "n": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts("a.parquet", "body") == ["one", "naïve"]


def test_files_of_several_kinds_join_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "z.txt").write_text("plain")
    (tmp_path / "a.jsonl").write_text('{"text": "json"}\n')
    pq.write_table(pa.table({"text": ["parquet"]}), tmp_path / "m.parquet")
    assert texts(["z.txt", "a.jsonl", "m.parquet"]) == ["plain", "json", "parquet"]


def test_the_standard_library_is_the_interpreters_own_without_tests_and_tables() -> None:
    files = stdlib_files()
    names = [file.as_posix() for file in files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert any(name.endswith("/asyncio/tasks.py") for name in names)
    assert len(files) > 300
    for folder in ("test", "tests", "site-packages", "__pycache__", "idlelib", "encodings"):
        assert not any(f"/{folder}/" in name.split("/lib/", 1)[1] for name in names)
    corpus = find_corpus("python-stdlib", "text", Path("hub"))
    assert isinstance(corpus, FileCorpus)
    assert corpus.files == tuple(files)


def test_the_digest_follows_contents_order_and_kind_but_not_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    before = digest(["a.txt", "b.txt"])
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert digest(["c.txt", "b.txt"]) == before
    assert digest(["b.txt", "c.txt"]) != before
    (tmp_path / "b.txt").write_text("twO")
    assert digest(["c.txt", "b.txt"]) != before
    (tmp_path / "b.txt").rename(tmp_path / "b.jsonl")
    (tmp_path / "b2.txt").write_text("twO")
    assert digest(["c.txt", "b.jsonl"]) != digest(["c.txt", "b2.txt"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", "'missing.txt' does not exist"),
        ("a/b/c", "'a/b/c' does not exist"),
        ("none/*.txt", r"'none/\*.txt' matches no file"),
        (["there.txt", "owner/name"], "'owner/name' matches no file"),
        ([], "empty list"),
        (".", "'.' is a folder"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, source: str | list[str], message: str
) -> None:
    (tmp_path / "there.txt").write_text("here")
    with pytest.raises(DataError, match=message):
        find_corpus(source, "text", Path("hub"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"good\n\xff", "a.txt: not UTF-8 text .* at byte 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n\n["text"]\n', "a.jsonl, line 3: no text under 'text'"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: no text under 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: half of a surrogate pair"),
        ("a.parquet", b"PAR0", "a.parquet is not a readable parquet file"),
    ],
)
def test_an_unreadable_file_is_named_with_the_place(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        texts(name)


def test_a_parquet_column_must_exist_and_hold_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'text', only n, body"):
        texts("a.parquet")
    with pytest.raises(DataError, match="'n' holds int64, not text"):
        texts("a.parquet", "n")


def test_a_hub_name_is_loaded_through_datasets_with_its_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((*args, kwargs))
        return datasets.Dataset.from_dict({"body": ["one", "", None, "two"], "n": [1, 2, 3, 4]})

    monkeypatch.setattr(corpora.datasets, "load_dataset", load_dataset)
    assert texts("owner/name:small", "body") == ["one", "two"]
    assert asked == [("owner/name", "small", {"split": "train", "cache_dir": "hub"})]
    assert find_corpus("wikitext", "text", Path("hub")) == HubCorpus(
        "wikitext", None, "text", Path("hub")
    )
    with pytest.raises(DataError, match="'owner/name' has no column 'text', only body, n"):
        texts("owner/name")


def test_a_data_set_that_cannot_be_loaded_is_an_error_of_the_corpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpora, "hub_is_reachable", lambda: True)

    def load_dataset(*_: object, **__: object) -> datasets.Dataset:
        raise ConnectionError("no network")

    monkeypatch.setattr(corpora.datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'owner/name' is neither .*no network"):
        texts("owner/name")
