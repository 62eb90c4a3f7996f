"""How the ranks of one cluster come to one decision, over CPU tensors whatever the accelerator."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class ClusterAgreement:
    """Small collectives among all ranks of one cluster. Implements `dsx.outer.agreement.Agreement`.

    Collective construction: it opens a gloo group of its own, since the default group of a GPU
    cluster is nccl, which carries no CPU tensors.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for the cluster."""
        return dist.get_rank() == 0

    def maximum(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        """The element-wise sum over the ranks, in float64: exact for integers below 2**53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum_later(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """`maximum`, begun now; the function that is returned waits for it."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def result() -> list[float]:
            assert work is not None
            work.wait()
            return tensor.tolist()

        return result

    def broadcast(self, decision: Any = None) -> Any:
        """Rank 0's `decision`, a small picklable object; the other ranks' argument is unused."""
        box = [decision]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, a small picklable object, in rank order, on every rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Return when all ranks have called."""
        dist.barrier(group=self._group)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return tensor.tolist()
