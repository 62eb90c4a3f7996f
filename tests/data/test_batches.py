from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data.batches import BatchStream, heldout_batches
from dsx.data.order import SampleOrder
from dsx.data.shards import ShardWriter, TokenBlocks, TokenStream, token_dtype
from dsx.errors import DataError

SEQ_LEN = 3
COUNT = 40


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> TokenBlocks:
    """Forty blocks; block i begins with token 3 i, so its number can be read off its ids."""
    folder: Path = tmp_path_factory.mktemp("blocks")
    with ShardWriter(folder, "train", token_dtype(200)) as writer:
        writer.append(np.arange(COUNT * SEQ_LEN + 1))
    files = [folder / shard.file for shard in writer.close()]
    return TokenBlocks(TokenStream(files, token_dtype(200)), SEQ_LEN, "train")


def rows(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return (batch[0][:, 0] // SEQ_LEN).tolist()


def stream(blocks: TokenBlocks, **changes: int) -> BatchStream:
    shape = {"micro_batch": 2, "accumulation": 3, "replica_index": 0, "replica_count": 1}
    return BatchStream(blocks, SampleOrder(len(blocks), seed=1), **(shape | changes))


def test_labels_are_the_next_tokens(blocks: TokenBlocks) -> None:
    batches = stream(blocks)
    batches.load(range(6))
    input_ids, labels = next(batches)
    assert input_ids.shape == labels.shape == (2, SEQ_LEN)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, input_ids + 1)


def test_rows_follow_the_formula(blocks: TokenBlocks) -> None:
    order = SampleOrder(COUNT, seed=1)
    replicas, accumulation, micro_batch = 2, 2, 2
    positions = [30, 31, 32, 33, 5, 6, 41, 42]
    for replica in range(replicas):
        batches = stream(
            blocks,
            micro_batch=micro_batch,
            accumulation=accumulation,
            replica_index=replica,
            replica_count=replicas,
        )
        assert batches.samples == len(positions)
        batches.load(positions)
        for micro in range(accumulation):
            start = micro * replicas * micro_batch + replica * micro_batch
            assert rows(next(batches)) == [
                order[positions[start]],
                order[positions[start + 1]],
            ]
        assert next(batches, None) is None


@settings(max_examples=30)
@given(replicas=st.integers(1, 3), accumulation=st.integers(1, 3), micro_batch=st.integers(1, 3))
def test_replicas_together_read_what_was_loaded_without_gap_or_repeat(
    blocks: TokenBlocks, replicas: int, accumulation: int, micro_batch: int
) -> None:
    seen: list[int] = []
    samples = replicas * accumulation * micro_batch
    for replica in range(replicas):
        part = stream(
            blocks,
            micro_batch=micro_batch,
            accumulation=accumulation,
            replica_index=replica,
            replica_count=replicas,
        )
        part.load(range(40, 40 + samples))
        seen += [row for batch in part for row in rows(batch)]
    order = SampleOrder(COUNT, seed=1)
    assert sorted(seen) == sorted(order[position] for position in range(40, 40 + samples))


def test_replicas_see_what_one_replica_with_more_accumulation_sees(blocks: TokenBlocks) -> None:
    alone = stream(blocks, accumulation=4)
    alone.load(range(8))
    shared: list[int] = []
    for replica in range(2):
        part = stream(blocks, accumulation=2, replica_index=replica, replica_count=2)
        part.load(range(8))
        shared += [row for batch in part for row in rows(batch)]
    assert sorted(row for batch in alone for row in rows(batch)) == sorted(shared)


def test_a_step_that_is_loaded_takes_the_place_of_what_was_left(blocks: TokenBlocks) -> None:
    batches = stream(blocks)
    batches.load(range(6))
    next(batches)
    batches.load(range(6, 12))
    order = SampleOrder(COUNT, seed=1)
    assert [row for batch in batches for row in rows(batch)] == [order[at] for at in range(6, 12)]
    with pytest.raises(ValueError, match="an inner step has 6 samples, not 5"):
        batches.load(range(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch": 0}, "micro_batch 0"),
        ({"accumulation": 0}, "accumulation 0"),
        ({"replica_index": -1}, r"replica_index -1 is not in \[0, 1\)"),
    ],
)
def test_impossible_shapes_are_refused(
    blocks: TokenBlocks, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stream(blocks, **changes)


def test_an_order_of_other_blocks_is_refused(blocks: TokenBlocks) -> None:
    with pytest.raises(ValueError, match="of 39 blocks, but there are 40"):
        BatchStream(blocks, SampleOrder(39, 0), 1, 1)


def test_heldout_batches_start_at_the_start_and_never_wrap(blocks: TokenBlocks) -> None:
    batches = heldout_batches(blocks, micro_batch=4, count=10)
    assert [rows(batch) for batch in batches] == [
        list(range(start, start + 4)) for start in range(0, 40, 4)
    ]
    assert torch.equal(batches[3][1], batches[3][0] + 1)
    with pytest.raises(DataError, match=r"needs 44 held-out blocks.*only 40 blocks"):
        heldout_batches(blocks, micro_batch=4, count=11)
