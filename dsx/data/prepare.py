"""`prepare`: build the data that the settings ask for once, reuse it ever after.

What is built is named by a digest of its inputs: the corpus' contents, the tokenizer's files,
`text_field`, `heldout_fraction` and the format's version. `seq_len` is no part of it, since shards
don't depend on it. A build happens in a temporary sibling folder, under a file lock, and is renamed
into place, so that several ranks (or runs) at once make one build and all see it whole.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from dsx.data.corpus import Corpus, find_corpus
from dsx.data.digests import FileDigests, text_digest
from dsx.data.prepared import FORMAT_VERSION, PreparedData, open_prepared, require_room
from dsx.errors import DataError
from dsx.settings.dsx_block import DataSettings, TrainTokenizer

if TYPE_CHECKING:
    from dsx.settings.settings import Settings

_TOKENIZER_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})


def prepare(settings: "Settings", embedding_rows: int | None = None) -> PreparedData:
    """Build or reuse the data of a whole settings file; see `prepare_data`."""
    return prepare_data(settings.dsx.data, settings.dsx.tokenizer, embedding_rows)


def prepare_data(
    data: DataSettings, tokenizer: str | TrainTokenizer, embedding_rows: int | None = None
) -> PreparedData:
    """Build the tokenizer and the shards under `data.cache_dir`, or reuse them.

    Safe with several processes at once: one builds, the others wait for it. Only the one that
    builds shows progress (on stderr, if that is a terminal).

    Args:
        data: source, split and block length; relative paths are seen from the working folder.
        tokenizer: an HF tokenizer's name or folder, or what to train.
        embedding_rows: of the model; a larger vocabulary is refused before anything is tokenized.

    Raises:
        DataError: the corpus or tokenizer is missing or unsuitable, a split is smaller than one
            block, or prepared data that was there is damaged.
    """
    if isinstance(tokenizer, TrainTokenizer):
        require_room(tokenizer.vocab_size, embedding_rows)
    cache = Path(data.cache_dir)
    corpus = find_corpus(data.source, data.text_field, cache / "hub")
    digests = FileDigests(cache / "file-digests.json")
    inputs = {
        "format_version": str(FORMAT_VERSION),
        "corpus": corpus.digest(digests),
        "tokenizer": _tokenizer_digest(tokenizer, digests),
        "text_field": data.text_field,
        "heldout_fraction": repr(data.heldout_fraction),
    }
    digest = text_digest(*(part for item in sorted(inputs.items()) for part in item))[:24]
    folder = cache / "prepared" / digest
    reused = folder.is_dir()
    if not reused:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{digest}.lock")):
            reused = folder.is_dir()
            if not reused:
                _build_at(
                    folder,
                    corpus,
                    data.heldout_fraction,
                    tokenizer,
                    embedding_rows,
                    inputs,
                    digests,
                )
    prepared = open_prepared(folder, data.seq_len, digests, reused=reused)
    require_room(prepared.vocab_size, embedding_rows)
    digests.save()
    return prepared


def _build_at(
    folder: Path,
    corpus: Corpus,
    heldout_fraction: float,
    tokenizer: str | TrainTokenizer,
    embedding_rows: int | None,
    inputs: dict[str, str],
    digests: FileDigests,
) -> None:
    """Build in a sibling of `folder`, then rename it; the caller holds the lock."""
    # transformers takes seconds to import, which opening what is there need not pay.
    from dsx.data.build import build
    from dsx.data.progress import build_progress

    # Under the lock nobody else builds this, so these are what killed builds left.
    for left_over in folder.parent.glob(f"{folder.name}.building-*"):
        shutil.rmtree(left_over)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        with build_progress() as progress:
            build(
                draft,
                corpus,
                tokenizer,
                embedding_rows,
                heldout_fraction,
                folder.name,
                inputs,
                progress,
            )
        if corpus.digest(digests) != inputs["corpus"]:
            raise DataError(
                "the corpus changed while it was being prepared; run again when nothing writes "
                "to its files"
            )
        # mkdtemp is private to the user; what is shared follows the umask like any folder.
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o777 & ~umask)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _tokenizer_digest(tokenizer: str | TrainTokenizer, digests: FileDigests) -> str:
    """Digest of a tokenizer's files, or of the order to train one (on the corpus' digest)."""
    if isinstance(tokenizer, TrainTokenizer):
        return text_digest("train", str(tokenizer.vocab_size))
    folder = Path(tokenizer)
    if folder.is_dir():
        return _folder_digest(folder, digests)
    from dsx.data.tokenizer import load_tokenizer, tokenizer_digest

    return tokenizer_digest(load_tokenizer(tokenizer))


def _folder_digest(folder: Path, digests: FileDigests) -> str:
    """Digest of what may matter to a tokenizer in an HF folder; weights don't."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES
    )
    parts = [part for path in files for part in (path.name, digests.of(path))]
    return text_digest("folder", *parts)
