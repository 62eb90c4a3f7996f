from itertools import islice
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
    shape = {
        "micro_batch": 2,
        "accumulation": 3,
        "cluster_index": 0,
        "cluster_count": 1,
        "replica_index": 0,
        "replica_count": 1,
    }
    return BatchStream(blocks, SampleOrder(len(blocks), seed=1), **(shape | changes))


def test_labels_are_the_next_tokens(blocks: TokenBlocks) -> None:
    input_ids, labels = next(stream(blocks))
    assert input_ids.shape == labels.shape == (2, SEQ_LEN)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, input_ids + 1)


def test_rows_follow_the_formula(blocks: TokenBlocks) -> None:
    order = SampleOrder(COUNT, seed=1)
    clusters, replicas, accumulation, micro_batch = 3, 2, 2, 2
    per_step = replicas * accumulation * micro_batch
    for cluster in range(clusters):
        for replica in range(replicas):
            batches = stream(
                blocks,
                micro_batch=micro_batch,
                accumulation=accumulation,
                cluster_index=cluster,
                cluster_count=clusters,
                replica_index=replica,
                replica_count=replicas,
            )
            for step in range(5):
                for micro in range(accumulation):
                    start = (step * clusters + cluster) * per_step
                    start += micro * replicas * micro_batch + replica * micro_batch
                    assert rows(next(batches)) == [order[start], order[start + 1]]


@settings(max_examples=30)
@given(
    clusters=st.integers(1, 3),
    replicas=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    first_step=st.integers(0, 20),
)
def test_clusters_and_replicas_together_read_the_order_without_gap_or_repeat(
    blocks: TokenBlocks,
    clusters: int,
    replicas: int,
    accumulation: int,
    micro_batch: int,
    first_step: int,
) -> None:
    steps = 3
    seen: list[int] = []
    for cluster in range(clusters):
        for replica in range(replicas):
            part = stream(
                blocks,
                micro_batch=micro_batch,
                accumulation=accumulation,
                cluster_index=cluster,
                cluster_count=clusters,
                replica_index=replica,
                replica_count=replicas,
            )
            seen += [
                position
                for step in range(first_step, first_step + steps)
                for micro in range(accumulation)
                for position in part.positions(step, micro)
            ]
    per_step = clusters * replicas * accumulation * micro_batch
    assert sorted(seen) == list(range(first_step * per_step, (first_step + steps) * per_step))


def test_replicas_see_what_one_replica_with_more_accumulation_sees(blocks: TokenBlocks) -> None:
    alone = [row for batch in islice(stream(blocks, accumulation=4), 4) for row in rows(batch)]
    shared = [
        row
        for replica in range(2)
        for batch in islice(
            stream(blocks, accumulation=2, replica_index=replica, replica_count=2), 2
        )
        for row in rows(batch)
    ]
    assert sorted(alone) == sorted(shared)


def test_steps_are_counted_when_their_last_micro_batch_is_given(blocks: TokenBlocks) -> None:
    batches = stream(blocks)
    counted = []
    for _ in range(7):
        next(batches)
        counted.append(batches.step)
    assert counted == [0, 0, 1, 1, 1, 2, 2]


def test_seeking_goes_on_exactly_where_an_undisturbed_stream_would_be(
    blocks: TokenBlocks,
) -> None:
    undisturbed = [rows(batch) for batch in islice(stream(blocks), 60)]
    moved = stream(blocks)
    next(moved)
    # Step 13 lies in the second epoch of forty blocks.
    moved.seek(13)
    assert moved.step == 13
    assert [rows(batch) for batch in islice(moved, 21)] == undisturbed[39:]
    moved.seek(0)
    assert rows(next(moved)) == undisturbed[0]
    with pytest.raises(ValueError, match="-1"):
        moved.seek(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch": 0}, "micro_batch 0"),
        ({"accumulation": 0}, "accumulation 0"),
        ({"cluster_index": 2, "cluster_count": 2}, r"cluster_index 2 is not in \[0, 2\)"),
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
        BatchStream(blocks, SampleOrder(39, 0), 1, 1, 0, 1, 0, 1)


def test_heldout_batches_start_at_the_start_and_never_wrap(blocks: TokenBlocks) -> None:
    batches = heldout_batches(blocks, micro_batch=4, count=10)
    assert [rows(batch) for batch in batches] == [
        list(range(start, start + 4)) for start in range(0, 40, 4)
    ]
    assert torch.equal(batches[3][1], batches[3][0] + 1)
    with pytest.raises(DataError, match=r"needs 44 held-out blocks.*only 40 blocks"):
        heldout_batches(blocks, micro_batch=4, count=11)
