import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from dsx.data.shards import ShardWriter, TokenBlocks, TokenStream, token_dtype
from dsx.errors import DataError


def stream_of(folder: Path, ids: np.ndarray, vocab_size: int, shard_tokens: int) -> TokenStream:
    dtype = token_dtype(vocab_size)
    with ShardWriter(folder, "train", dtype, shard_tokens) as writer:
        for part in np.array_split(ids, 7):
            writer.append(part)
    return TokenStream([folder / shard.file for shard in writer.close()], dtype)


def test_ids_take_two_bytes_as_long_as_they_fit() -> None:
    assert token_dtype(65536).str == "<u2"
    assert token_dtype(65537).str == "<u4"


@pytest.mark.parametrize("vocab_size", [65536, 150_000])
@pytest.mark.parametrize("shard_tokens", [10, 33, 1000])
def test_a_stream_reads_back_what_was_written_across_shards(
    tmp_path: Path, vocab_size: int, shard_tokens: int
) -> None:
    ids = np.random.default_rng(0).integers(0, vocab_size, size=100)
    ids[3] = vocab_size - 1
    stream = stream_of(tmp_path, ids, vocab_size, shard_tokens)
    assert len(stream) == 100
    for start, stop in [(0, 100), (0, 0), (9, 11), (10, 20), (31, 99), (100, 100)]:
        np.testing.assert_array_equal(stream.read(start, stop), ids[start:stop])
    with pytest.raises(IndexError, match="101"):
        stream.read(5, 101)


def test_shards_are_cut_at_their_limit_and_described(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "heldout", token_dtype(10), shard_tokens=4) as writer:
        writer.append(np.arange(9))
    shards = writer.close()
    assert [(shard.file, shard.tokens) for shard in shards] == [
        ("heldout-00000.bin", 4),
        ("heldout-00001.bin", 4),
        ("heldout-00002.bin", 1),
    ]
    for shard in shards:
        data = (tmp_path / shard.file).read_bytes()
        assert len(data) == 2 * shard.tokens
        assert hashlib.sha256(data).hexdigest() == shard.sha256


def test_neighbouring_blocks_share_one_token_and_no_token_is_predicted_twice(
    tmp_path: Path,
) -> None:
    stream = stream_of(tmp_path, np.arange(50), 50, shard_tokens=13)
    blocks = TokenBlocks(stream, seq_len=8, split="train")
    # 49 tokens can be predicted: six blocks of eight, one token unused.
    assert len(blocks) == 6
    assert blocks.token_count == 50
    assert blocks[0].dtype == torch.int64
    assert blocks[0].tolist() == list(range(9))
    assert blocks[5].tolist() == list(range(40, 49))
    predicted = [token for block in blocks for token in block[1:].tolist()]
    assert predicted == list(range(1, 49))


def test_a_block_is_as_long_as_asked_at_the_exact_limit(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, np.arange(17), 50, shard_tokens=100)
    assert len(TokenBlocks(stream, seq_len=16, split="train")) == 1
    assert len(TokenBlocks(stream, seq_len=8, split="train")) == 2
    with pytest.raises(DataError, match=r"heldout text has 17 tokens.*seq_len 17 needs 18"):
        TokenBlocks(stream, seq_len=17, split="heldout")


def test_a_block_outside_the_split_is_refused(tmp_path: Path) -> None:
    blocks = TokenBlocks(stream_of(tmp_path, np.arange(50), 50, 100), seq_len=8, split="train")
    for index in (-1, 6):
        with pytest.raises(IndexError, match=rf"block {index} is not in \[0, 6\)"):
            blocks[index]
