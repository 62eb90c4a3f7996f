"""Which documents are held out: decided by a hash of their text, so equal documents stay together.

Hash and share fix the split; neither a seed, nor file names, nor the order of files has a say. The
held-out documents are those with the smallest hashes, as many as the share asks for, at least one.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from dsx.errors import DataError


def document_hash(text: str) -> int:
    """The first 64 bits of BLAKE2b of the text's UTF-8 bytes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def document_hashes(texts: Iterable[str], count: int) -> np.ndarray:
    """`document_hash` of each of `count` texts: uint64 (count,)."""
    return np.fromiter((document_hash(text) for text in texts), dtype=np.uint64, count=count)


def heldout_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out: bool (documents,).

    The documents with the k smallest hashes, k = max(1, round(fraction * documents)), and all that
    equal one of them.

    Raises:
        DataError: nothing would be left on one side.
    """
    if len(hashes) < 2:
        raise DataError(
            f"the corpus has {len(hashes)} document(s), but a held-out split by document needs at "
            "least 2; a text file is one document, so split it, or give one document per line as "
            "jsonl"
        )
    wanted = max(1, round(fraction * len(hashes)))
    mask: np.ndarray = hashes <= np.partition(hashes, wanted - 1)[wanted - 1]
    if mask.all():
        raise DataError(
            f"holding out {wanted} of {len(hashes)} documents leaves none to train on, since all "
            "others equal them; give more different documents or lower data.heldout_fraction"
        )
    return mask
