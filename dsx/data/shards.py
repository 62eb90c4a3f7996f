"""Packed token shards: one stream of token ids per split, cut into memory-mapped files.

A shard is nothing but little-endian uint16 (or uint32, when ids need it). Documents follow each
other, each ended by EOS; there is no padding. How long a training sequence is, is decided on
reading, so one preparation serves every `seq_len`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from dsx.errors import DataError

SHARD_TOKENS = 1 << 28


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned dtype, uint16 or uint32, that holds ids below it."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class Shard:
    """One file of a split: its name, its tokens and the SHA-256 of its bytes."""

    file: str
    tokens: int
    sha256: str


class ShardWriter:
    """Appends token ids to the shards of one split; use as a context manager.

    Args:
        folder: where the shard files go.
        split: their common name: `split-00000.bin`, `split-00001.bin`, ...
        dtype: what `token_dtype` gave.
        shard_tokens: tokens after which a new file begins.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._tokens = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, ids: np.ndarray) -> None:
        """Append a 1-D array of ids that fit the dtype."""
        while len(ids):
            if self._file is None:
                name = f"{self._split}-{len(self._shards):05d}.bin"
                self._file = (self._folder / name).open("wb")
                self._hash, self._tokens = hashlib.sha256(), 0
            part, ids = np.split(ids, [self._shard_tokens - self._tokens])
            data = part.astype(self._dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self._tokens += len(part)
            if self._tokens == self._shard_tokens:
                self._finish()

    def _finish(self) -> None:
        if self._file is not None:
            name = Path(self._file.name).name
            self._file.close()
            self._file = None
            self._shards.append(Shard(name, self._tokens, self._hash.hexdigest()))

    def close(self) -> list[Shard]:
        """Finish the last file and return all shards in order; may be called again."""
        self._finish()
        return list(self._shards)


class TokenStream:
    """The shards of one split as one sequence of ids, memory-mapped.

    Args:
        files: the shards in order.
        dtype: their dtype.
    """

    def __init__(self, files: Sequence[Path], dtype: np.dtype) -> None:
        self._maps = [np.memmap(file, dtype=dtype, mode="r") for file in files]
        self._starts = np.cumsum([0, *(len(part) for part in self._maps)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) as int64 (stop - start,); the range may cross shards.

        Raises:
            IndexError: the range leaves the stream.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) are not inside [0, {len(self)})")
        out = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            end = min(stop, int(self._starts[shard + 1]))
            offset = int(self._starts[shard])
            out[at - start : end - start] = self._maps[shard][at - offset : end - offset]
            at, shard = end, shard + 1
        return out


class TokenBlocks:
    """A split as training sequences: `blocks[i]` is LongTensor (seq_len + 1,).

    Block i holds tokens [i * seq_len, (i + 1) * seq_len]: neighbours overlap by one token, so every
    token after the first is predicted exactly once. Tokens that don't fill a last block are unused.

    Args:
        stream: the split's tokens.
        seq_len: tokens that a block predicts.
        split: its name, for messages.

    Raises:
        DataError: the split doesn't fill a single block.
    """

    def __init__(self, stream: TokenStream, seq_len: int, split: str) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self._count = max(0, (len(stream) - 1) // seq_len)
        if self._count == 0:
            more = "more text"
            if split == "heldout":
                more += ", or a larger data.heldout_fraction"
            raise DataError(
                f"the {split} text has {len(stream)} tokens, but one block of seq_len {seq_len} "
                f"needs {seq_len + 1}; give a smaller data.seq_len, or {more}"
            )

    @property
    def token_count(self) -> int:
        """Tokens of the split, EOS included."""
        return len(self.stream)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self._count:
            raise IndexError(f"block {index} is not in [0, {self._count})")
        start = index * self.seq_len
        return torch.from_numpy(self.stream.read(start, start + self.seq_len + 1))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(self._count))
