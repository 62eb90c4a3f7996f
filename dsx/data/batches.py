"""Micro-batches of the samples of an inner step, and of the held-out text.

Which positions of the sample order a cluster trains in an inner step is decided elsewhere
(`dsx.outer.leases`; a run without other clusters simply counts). Of these positions, with D
replicas, micro-batch m, replica d, row b is number `(m * D + d) * micro_batch + b`: a change of
accumulation against replicas leaves the samples of a step the same.
"""

from collections.abc import Iterator, Sequence

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
    """The micro-batches of one replica: `load` an inner step, then take them one by one.

    Args:
        blocks: the training blocks.
        order: their order; its `count` must be `len(blocks)`.
        micro_batch: rows of a micro-batch.
        accumulation: micro-batches per inner step.
        replica_index, replica_count: this data-parallel replica inside the cluster.

    Raises:
        ValueError: an index outside its count, a count below 1, or an order of another length.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        order: SampleOrder,
        micro_batch: int,
        accumulation: int,
        replica_index: int = 0,
        replica_count: int = 1,
    ) -> None:
        if min(micro_batch, accumulation, replica_count) < 1:
            raise ValueError(
                f"micro_batch {micro_batch}, accumulation {accumulation} and replica_count "
                f"{replica_count} must all be at least 1"
            )
        if not 0 <= replica_index < replica_count:
            raise ValueError(f"replica_index {replica_index} is not in [0, {replica_count})")
        if order.count != len(blocks):
            raise ValueError(f"the order is of {order.count} blocks, but there are {len(blocks)}")
        self.blocks = blocks
        self.order = order
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.replica_index = replica_index
        self.replica_count = replica_count
        self._rows: list[Sequence[int]] = []

    @property
    def samples(self) -> int:
        """Of an inner step of the whole cluster."""
        return self.replica_count * self.accumulation * self.micro_batch

    def load(self, positions: Sequence[int]) -> None:
        """Go over to the inner step that trains these positions of the order; what was left of the
        one before is let go.

        Raises:
            ValueError: they are not `samples` many.
        """
        if len(positions) != self.samples:
            raise ValueError(f"an inner step has {self.samples} samples, not {len(positions)}")
        starts = range(
            self.replica_index * self.micro_batch, self.samples, self.samples // self.accumulation
        )
        self._rows = [positions[start : start + self.micro_batch] for start in starts]

    def __next__(self) -> MicroBatch:
        if not self._rows:
            raise StopIteration
        return collate(self.blocks, [self.order[at] for at in self._rows.pop(0)])


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
