"""Prepared data on disk: the manifest, and opening it with every file checked.

A folder `CACHE/prepared/DIGEST` holds `manifest.json`, the shards of the splits `train` and
`heldout`, and `tokenizer/`. It appears by one rename when it is complete, and never changes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dsx.data.digests import FileDigests
from dsx.data.shards import TokenBlocks, TokenStream
from dsx.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"


class StoredFile(BaseModel):
    """Size in bytes and SHA-256 of a file of the folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    sha256: str


class StoredSplit(BaseModel):
    """One split: its documents, tokens (EOS included), UTF-8 bytes and shard files in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: int
    tokens: int
    text_bytes: int
    shards: tuple[str, ...]


class Manifest(BaseModel):
    """What `manifest.json` says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    digest: str
    inputs: dict[str, str]
    vocab_size: int
    eos_token_id: int
    token_dtype: str
    train: StoredSplit
    heldout: StoredSplit
    heldout_gzip_bits_per_byte: float
    heldout_gzip_stream_bits_per_byte: float
    files: dict[str, StoredFile]


@dataclass(frozen=True)
class PreparedData:
    """Everything a run needs of its corpus.

    `heldout_bytes_per_token` is UTF-8 bytes of the held-out documents per held-out token, EOS
    included: a loss L in nats per token is L / ln 2 / heldout_bytes_per_token bits per byte.
    `heldout_gzip_bits_per_byte` is what `gzip -9` needs on the same documents, each as a file;
    `heldout_gzip_stream_bits_per_byte` on all of them as one stream.
    """

    folder: Path
    tokenizer_folder: Path
    vocab_size: int
    eos_token_id: int
    train: TokenBlocks
    heldout: TokenBlocks
    train_documents: int
    heldout_documents: int
    train_bytes: int
    heldout_bytes: int
    heldout_bytes_per_token: float
    heldout_gzip_bits_per_byte: float
    heldout_gzip_stream_bits_per_byte: float
    digest: str
    reused: bool


def require_room(entries: int, embedding_rows: int | None) -> None:
    """Refuse a vocabulary that the model has no room for; `embedding_rows` None: no model yet.

    Raises:
        DataError: the vocabulary has more entries than the model's embedding has rows.
    """
    if embedding_rows is not None and entries > embedding_rows:
        raise DataError(
            f"the tokenizer has {entries} entries, but the model's embedding only "
            f"{embedding_rows} rows: set vocab_size in dsx.model.config to at least {entries}, or "
            "choose a smaller dsx.tokenizer"
        )


def open_prepared(
    folder: Path, seq_len: int, digests: FileDigests, *, reused: bool
) -> PreparedData:
    """Open a finished folder after checking each of its files by size and SHA-256.

    Args:
        folder: the folder with the manifest.
        seq_len: tokens that a block predicts.
        digests: computes (or remembers) the files' digests.
        reused: whether it had been there before this call.

    Raises:
        DataError: a file is missing or damaged, or a split has not one block of `seq_len`.
    """
    manifest = read_manifest(folder)
    for name, stored in manifest.files.items():
        _check_file(folder, name, stored, digests)
    dtype = np.dtype(manifest.token_dtype)

    def blocks(split: str, stored: StoredSplit) -> TokenBlocks:
        stream = TokenStream([folder / name for name in stored.shards], dtype)
        return TokenBlocks(stream, seq_len, split)

    return PreparedData(
        folder=folder,
        tokenizer_folder=folder / TOKENIZER,
        vocab_size=manifest.vocab_size,
        eos_token_id=manifest.eos_token_id,
        train=blocks("train", manifest.train),
        heldout=blocks("heldout", manifest.heldout),
        train_documents=manifest.train.documents,
        heldout_documents=manifest.heldout.documents,
        train_bytes=manifest.train.text_bytes,
        heldout_bytes=manifest.heldout.text_bytes,
        heldout_bytes_per_token=manifest.heldout.text_bytes / manifest.heldout.tokens,
        heldout_gzip_bits_per_byte=manifest.heldout_gzip_bits_per_byte,
        heldout_gzip_stream_bits_per_byte=manifest.heldout_gzip_stream_bits_per_byte,
        digest=manifest.digest,
        reused=reused,
    )


def read_manifest(folder: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        DataError: it is missing or damaged, or another folder's.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise _damaged(folder, MANIFEST, f"can't be read ({type(error).__name__})") from error
    if manifest.digest != folder.name or manifest.format_version != FORMAT_VERSION:
        raise _damaged(
            folder,
            MANIFEST,
            f"is of data {manifest.digest} in format {manifest.format_version}, not of "
            f"{folder.name} in format {FORMAT_VERSION}",
        )
    return manifest


def _check_file(folder: Path, name: str, stored: StoredFile, digests: FileDigests) -> None:
    path = folder / name
    if not path.is_file():
        raise _damaged(folder, name, "is missing")
    size = path.stat().st_size
    if size != stored.bytes:
        raise _damaged(folder, name, f"has {size} bytes instead of {stored.bytes}")
    found = digests.of(path)
    if found != stored.sha256:
        raise _damaged(folder, name, f"has SHA-256 {found} instead of {stored.sha256}")


def _damaged(folder: Path, name: str, what: str) -> DataError:
    return DataError(
        f"the prepared data is damaged: {folder / name} {what}; delete the folder {folder} and run "
        "`dsx prepare` again"
    )
