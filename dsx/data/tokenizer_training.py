"""Train a tokenizer on a corpus and leave it as an HF folder (`dsx tokenizer train`)."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsx.data import tokenizer as tokenizers
from dsx.data.build import texts_of, tokenize
from dsx.data.corpus import find_corpus
from dsx.data.progress import build_progress
from dsx.errors import DataError


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer's folder, and what it makes of the corpus it was trained on.

    `tokens` counts one EOS per document.
    """

    folder: Path
    vocab_size: int
    documents: int
    text_bytes: int
    tokens: int

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of the corpus per token."""
        return self.text_bytes / self.tokens


def train_tokenizer_folder(
    source: str | Sequence[str],
    vocab_size: int,
    output: Path,
    *,
    text_field: str = "text",
    cache_dir: Path = Path(".cache/dsx"),
) -> TrainedTokenizer:
    """Train a byte-level BPE on all documents of a corpus and write it to `output`.

    Args:
        source: as `data.source`.
        vocab_size: entries of the vocabulary, EOS and the 256 bytes included.
        output: the folder to write; must not exist, or be empty.
        text_field: the column with a document's text, where documents have columns.
        cache_dir: for what `datasets` keeps, and for scratch files.

    Raises:
        DataError: the corpus is missing or too small, or `output` holds something.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} exists already; remove it, or write to another folder")
    corpus = find_corpus(source, text_field, cache_dir / "hub")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="tokenizer-", dir=cache_dir) as scratch,
        build_progress() as progress,
    ):
        documents = corpus.documents(Path(scratch))
        trained = tokenizers.train_tokenizer(
            texts_of(documents, progress, "training the tokenizer"), vocab_size
        )
        tokenizers.save_tokenizer(trained, output)
        tokens = tokenize(documents, trained, str(output), Path(scratch), progress)
        table = tokens.with_format("arrow")
        lengths = [
            batch["ids"].combine_chunks().value_lengths().to_numpy()
            for batch in table.iter(batch_size=1000)
        ]
        return TrainedTokenizer(
            folder=output,
            vocab_size=len(trained),
            documents=len(documents),
            text_bytes=int(np.sum(tokens["bytes"])),
            tokens=int(np.concatenate(lengths).sum()),
        )
