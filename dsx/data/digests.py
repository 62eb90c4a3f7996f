"""SHA-256 of files, so that a changed input or a damaged shard is noticed by content.

Large files are remembered by their stat signature: every rank asks for the same digests at every
start, and reading a terabyte each time would cost hours. The signature includes the change time,
which no program can set, so only damage below the file system escapes it.
"""

import hashlib
import json
import os
import time
from pathlib import Path

REMEMBERED_BYTES = 16 << 20
# A file written twice within one tick of the clock keeps its change time, so one that changed just
# now isn't remembered (git calls such an entry racily clean).
_SETTLED_SECONDS = 2.0


def text_digest(*parts: str) -> str:
    """SHA-256 (hex) of the parts, each framed by its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


class FileDigests:
    """Digests of files, with a memo for those of at least `remembered_bytes`.

    Args:
        memo: JSON file of the memo; a missing or unreadable one only costs time.
        remembered_bytes: size from which a file's digest is remembered.
    """

    def __init__(self, memo: Path, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._memo = memo
        self._remembered_bytes = remembered_bytes
        self._known: dict[str, list[int | str]] = {}
        self._changed = False
        try:
            known = json.loads(memo.read_text())
        except (OSError, ValueError):
            known = {}
        if isinstance(known, dict):
            self._known = known

    def of(self, path: Path) -> str:
        """SHA-256 (hex) of the file's bytes.

        Raises:
            OSError: the file can't be read.
        """
        stat = path.stat()
        if stat.st_size < self._remembered_bytes:
            return _sha256(path)
        key = str(path.resolve())
        signature = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
        known = self._known.get(key)
        if isinstance(known, list) and known[:-1] == signature:
            return str(known[-1])
        digest = _sha256(path)
        if time.time() - stat.st_ctime > _SETTLED_SECONDS:
            self._known[key] = [*signature, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Write the memo, atomically; of several ranks at once the last one's stays."""
        if self._changed:
            self._memo.parent.mkdir(parents=True, exist_ok=True)
            draft = self._memo.with_name(f"{self._memo.name}.{os.getpid()}")
            draft.write_text(json.dumps(self._known))
            draft.replace(self._memo)
            self._changed = False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
