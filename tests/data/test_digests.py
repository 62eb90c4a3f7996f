import hashlib
import os
from pathlib import Path

import pytest

from dsx.data import digests as module
from dsx.data.digests import FileDigests, text_digest


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock be far past every change, so that digests are remembered."""
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3600)


def test_parts_of_a_digest_are_framed() -> None:
    assert text_digest("ab", "c") != text_digest("a", "bc")
    assert text_digest("a") != text_digest("a", "")


def test_a_remembered_file_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    file, memo = tmp_path / "big", tmp_path / "cache" / "memo.json"
    file.write_bytes(b"content")
    first = FileDigests(memo, remembered_bytes=7)
    assert first.of(file) == sha(b"content")
    first.save()

    def read(_: Path) -> str:
        raise AssertionError("read again")

    monkeypatch.setattr(module, "_sha256", read)
    assert FileDigests(memo, remembered_bytes=7).of(file) == sha(b"content")
    with pytest.raises(AssertionError, match="read again"):
        FileDigests(memo, remembered_bytes=8).of(file)


def test_a_change_is_seen_even_if_size_and_modification_time_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(monkeypatch)
    file = tmp_path / "big"
    file.write_bytes(b"content")
    digests = FileDigests(tmp_path / "memo.json", remembered_bytes=0)
    digests.of(file)
    before = file.stat()
    replaced = tmp_path / "new"
    replaced.write_bytes(b"CONTENT")
    replaced.replace(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests.of(file) == sha(b"CONTENT")


def test_a_file_that_changed_just_now_is_read_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "big"
    file.write_bytes(b"content")
    monkeypatch.setattr(module.time, "time", lambda: file.stat().st_ctime + 1.9)
    digests = FileDigests(tmp_path / "memo.json", remembered_bytes=0)
    digests.of(file)
    digests.save()
    assert not (tmp_path / "memo.json").exists()


@pytest.mark.parametrize("content", ["{", "[1]", '{"x": 3}'])
def test_a_damaged_memo_only_costs_time(tmp_path: Path, content: str) -> None:
    file, memo = tmp_path / "big", tmp_path / "memo.json"
    file.write_bytes(b"content")
    memo.write_text(content.replace('"x"', f'"{file.resolve()}"'))
    assert FileDigests(memo, remembered_bytes=0).of(file) == sha(b"content")
