"""Micro-batches for inner steps and for evaluation, addressed by step so that nothing is stored.

With C clusters and B = replica_count * accumulation * micro_batch samples per cluster and inner
step, cluster c trains at inner step s on the sample positions [(s*C + c)*B, (s*C + c + 1)*B).
Inside that range, micro-batch m, replica d, row b is position m*D*micro_batch + d*micro_batch + b:
the clusters together read one global order, disjointly, and a change of accumulation against
replicas leaves the samples of a step the same. When the clusters change, counting begins anew at a
`first_step` and a `first_position`, which take the place of s = 0 and of position 0.
"""

from collections.abc import Iterator

import torch

from dsx.data.order import SampleOrder
from dsx.data.shards import TokenBlocks
from dsx.errors import DataError

MicroBatch = tuple[torch.Tensor, torch.Tensor]


def collate(blocks: TokenBlocks, indices: list[int]) -> MicroBatch:
    """Stack blocks into `(input_ids, labels)`, both LongTensor (len(indices), seq_len).

    `labels[b, t]` is the token that follows `input_ids[b, t]`.
    """
    rows = torch.stack([blocks[index] for index in indices])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class BatchStream(Iterator[MicroBatch]):
    """Endless micro-batches of one replica of one cluster (see the module's formula).

    Args:
        blocks: the training blocks.
        order: their order; its `count` must be `len(blocks)`.
        micro_batch: rows of a micro-batch.
        accumulation: micro-batches per inner step.
        cluster_index, cluster_count: this cluster among all.
        replica_index, replica_count: this data-parallel replica inside the cluster.
        first_step, first_position: the inner step and the sample position that counting begins at.

    Raises:
        ValueError: an index outside its count, a count below 1, or an order of another length.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        order: SampleOrder,
        micro_batch: int,
        accumulation: int,
        cluster_index: int,
        cluster_count: int,
        replica_index: int,
        replica_count: int,
        first_step: int = 0,
        first_position: int = 0,
    ) -> None:
        if min(micro_batch, accumulation, cluster_count, replica_count) < 1:
            raise ValueError(
                f"micro_batch {micro_batch}, accumulation {accumulation}, cluster_count "
                f"{cluster_count} and replica_count {replica_count} must all be at least 1"
            )
        if not 0 <= cluster_index < cluster_count:
            raise ValueError(f"cluster_index {cluster_index} is not in [0, {cluster_count})")
        if not 0 <= replica_index < replica_count:
            raise ValueError(f"replica_index {replica_index} is not in [0, {replica_count})")
        if order.count != len(blocks):
            raise ValueError(f"the order is of {order.count} blocks, but there are {len(blocks)}")
        self.blocks = blocks
        self.order = order
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.cluster_index = cluster_index
        self.cluster_count = cluster_count
        self.replica_index = replica_index
        self.replica_count = replica_count
        self.first_step = first_step
        self.first_position = first_position
        self._micro_batches_given = 0

    @property
    def step(self) -> int:
        """Inner steps whose micro-batches have all been given out."""
        return self._micro_batches_given // self.accumulation

    def seek(self, step: int) -> None:
        """Go to the first micro-batch of inner step `step` (`first_step` or more).

        Raises:
            ValueError: `step` is before `first_step`.
        """
        if step < self.first_step:
            raise ValueError(f"inner steps start at {self.first_step}; cannot seek to {step}")
        self._micro_batches_given = step * self.accumulation

    def positions(self, step: int, micro: int) -> range:
        """Sample positions of the rows of micro-batch `micro` of inner step `step`."""
        per_micro = self.replica_count * self.micro_batch
        per_step = self.accumulation * per_micro
        counted = step - self.first_step
        start = (
            self.first_position
            + (counted * self.cluster_count + self.cluster_index) * per_step
            + micro * per_micro
            + self.replica_index * self.micro_batch
        )
        return range(start, start + self.micro_batch)

    def __next__(self) -> MicroBatch:
        step, micro = divmod(self._micro_batches_given, self.accumulation)
        batch = collate(self.blocks, [self.order[at] for at in self.positions(step, micro)])
        self._micro_batches_given += 1
        return batch


def heldout_batches(blocks: TokenBlocks, micro_batch: int, count: int) -> list[MicroBatch]:
    """The first `count` micro-batches of the held-out blocks, in their own order, without wrapping.

    Each is `(input_ids, labels)`, both LongTensor (micro_batch, seq_len).

    Raises:
        DataError: the held-out text has fewer than `count * micro_batch` blocks.
    """
    needed = count * micro_batch
    if needed > len(blocks):
        raise DataError(
            f"evaluation needs {needed} held-out blocks ({count} micro-batches of {micro_batch}), "
            f"but the held-out text fills only {len(blocks)} blocks of {blocks.seq_len} tokens; "
            "lower training.eval_batches or data.seq_len, or raise data.heldout_fraction"
        )
    return [
        collate(blocks, list(range(start, start + micro_batch)))
        for start in range(0, needed, micro_batch)
    ]
