"""Build prepared data in a new folder: split, tokenize through `datasets`, pack, describe."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
from rich.progress import Progress

from dsx.data import tokenizer as tokenizers
from dsx.data.compressed import gzip_bits_per_byte
from dsx.data.corpus import Corpus
from dsx.data.digests import FileDigests, text_digest
from dsx.data.prepared import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
    StoredFile,
    StoredSplit,
    require_room,
)
from dsx.data.shards import ShardWriter, token_dtype
from dsx.data.split import document_hashes, heldout_mask
from dsx.settings.dsx_block import TrainTokenizer

# Documents per batch: a document may be a whole file, so that a batch is some MB.
_BATCH = 256


def texts_of(documents: datasets.Dataset, progress: Progress, what: str) -> Iterator[str]:
    """The documents' texts in order, counted by the progress display as `what`."""
    task = progress.add_task(what, total=len(documents))
    for batch in documents.iter(batch_size=_BATCH):
        # Counted first: who takes exactly as many texts as there are never asks for the end.
        progress.advance(task, len(batch["text"]))
        yield from batch["text"]


def tokenize(
    documents: datasets.Dataset,
    tokenizer: tokenizers.PreTrainedTokenizerBase,
    name: str,
    scratch: Path,
    progress: Progress,
) -> datasets.Dataset:
    """The documents as columns `ids` (int32, one EOS at the end) and `bytes` (UTF-8), in order.

    Raises:
        DataError: the tokenizer is unsuitable (see `encode_documents`).
    """
    task = progress.add_task("tokenizing documents", total=len(documents))

    def encode(batch: dict[str, list[str]]) -> dict[str, list]:
        texts = batch["text"]
        ids = tokenizers.encode_documents(tokenizer, texts, name)
        progress.advance(task, len(texts))
        return {"ids": ids, "bytes": [len(text.encode()) for text in texts]}

    return documents.map(
        encode,
        batched=True,
        batch_size=_BATCH,
        writer_batch_size=_BATCH,
        remove_columns=documents.column_names,
        features=datasets.Features(
            {"ids": datasets.LargeList(datasets.Value("int32")), "bytes": datasets.Value("int64")}
        ),
        cache_file_name=str(scratch / "tokens.arrow"),
        load_from_cache_file=False,
        # Nothing is looked up by fingerprint; a fixed one saves hashing the tokenizer.
        new_fingerprint=text_digest("tokens")[:16],
    )


def build(
    folder: Path,
    corpus: Corpus,
    wanted_tokenizer: str | TrainTokenizer,
    embedding_rows: int | None,
    heldout_fraction: float,
    digest: str,
    inputs: dict[str, str],
    progress: Progress,
) -> None:
    """Fill the new, empty `folder` with shards, tokenizer and manifest.

    A tokenizer that is trained here sees the training documents only.

    Raises:
        DataError: corpus or tokenizer are unsuitable, or the tokenizer has more entries than the
            model `embedding_rows`.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = corpus.documents(scratch)
    hashes = document_hashes(texts_of(documents, progress, "splitting documents"), len(documents))
    heldout = heldout_mask(hashes, heldout_fraction)

    if isinstance(wanted_tokenizer, TrainTokenizer):
        name = f"trained with vocab_size {wanted_tokenizer.vocab_size}"
        train = documents.select(np.flatnonzero(~heldout))
        tokenizer = tokenizers.train_tokenizer(
            texts_of(train, progress, "training the tokenizer"), wanted_tokenizer.vocab_size
        )
    else:
        name = wanted_tokenizer
        tokenizer = tokenizers.load_tokenizer(name)
    require_room(len(tokenizer), embedding_rows)
    tokenizers.save_tokenizer(tokenizer, folder / TOKENIZER)

    tokens = tokenize(documents, tokenizer, name, scratch, progress)
    vocab_size = len(tokenizer)
    dtype = token_dtype(vocab_size)
    train_split, heldout_split, files = _pack(folder, tokens, heldout, dtype, progress)
    held_texts = documents.select(np.flatnonzero(heldout))
    by_file, by_stream = gzip_bits_per_byte(texts_of(held_texts, progress, "measuring gzip -9"))

    del documents, tokens, held_texts
    shutil.rmtree(scratch)
    digests = FileDigests(folder / "no-memo")
    for path in sorted((folder / TOKENIZER).rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = StoredFile(
                bytes=path.stat().st_size, sha256=digests.of(path)
            )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        digest=digest,
        inputs=inputs,
        vocab_size=vocab_size,
        eos_token_id=tokenizers.eos_id(tokenizer, name),
        token_dtype=dtype.str,
        train=train_split,
        heldout=heldout_split,
        heldout_gzip_bits_per_byte=by_file,
        heldout_gzip_stream_bits_per_byte=by_stream,
        files=files,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")


def _pack(
    folder: Path, tokens: datasets.Dataset, heldout: np.ndarray, dtype: np.dtype, progress: Progress
) -> tuple[StoredSplit, StoredSplit, dict[str, StoredFile]]:
    """Write both splits' shards; `heldout` is the mask over the documents (rows of `tokens`)."""
    task = progress.add_task("writing shards", total=len(tokens))
    text_bytes = np.zeros(2, dtype=np.int64)
    row = 0
    with (
        ShardWriter(folder, "train", dtype) as train,
        ShardWriter(folder, "heldout", dtype) as held,
    ):
        for table in tokens.with_format("arrow").iter(batch_size=_BATCH):
            column = table["ids"].combine_chunks()
            ids = column.flatten().to_numpy()
            held_rows = heldout[row : row + len(column)]
            held_tokens = np.repeat(held_rows, column.value_lengths().to_numpy())
            train.append(ids[~held_tokens])
            held.append(ids[held_tokens])
            sizes = table["bytes"].to_numpy()
            text_bytes += (sizes[~held_rows].sum(), sizes[held_rows].sum())
            row += len(column)
            progress.advance(task, len(column))
    files: dict[str, StoredFile] = {}

    def split(writer: ShardWriter, documents: int, size: int) -> StoredSplit:
        shards = writer.close()
        for shard in shards:
            stored = StoredFile(bytes=shard.tokens * dtype.itemsize, sha256=shard.sha256)
            files[shard.file] = stored
        return StoredSplit(
            documents=documents,
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=size,
            shards=tuple(shard.file for shard in shards),
        )

    held_count = int(heldout.sum())
    train_split = split(train, len(heldout) - held_count, int(text_bytes[0]))
    return train_split, split(held, held_count, int(text_bytes[1])), files
