"""Who owns which tensor among the data-parallel replicas of a stage, and in which pieces it moves.

ZeRO-1 cuts a stage's parameters into equal flat partitions, so that a tensor may lie on two
replicas. The outer engine wants whole tensors: each is assigned to one *owner* replica.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a tensor in row-major order."""

    name: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def cut(self, start: int, stop: int) -> "Span":
        """The part of this span inside [start, stop); empty when they don't meet."""
        low = min(max(self.start, start), self.stop)
        return Span(self.name, low, max(low, min(self.stop, stop)))


def assign_owners(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Largest tensor first, each to the replica that owns the fewest elements so far.

    `sizes`: elements of each tensor. Pure: every rank of every cluster comes to the same result.
    """
    load = [0] * replicas
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner = load.index(min(load))
        owners[name] = owner
        load[owner] += sizes[name]
    return {name: owners[name] for name in sizes}


def buckets(sizes: Mapping[str, int], limit: int) -> Iterator[list[Span]]:
    """Cut tensors into spans and group these into buckets of at most `limit` elements.

    Tensors keep the order of `sizes`; only those above `limit` are cut.
    """
    bucket: list[Span] = []
    filled = 0
    for name, size in sizes.items():
        for start in range(0, size, limit):
            span = Span(name, start, min(size, start + limit))
            if filled + len(span) > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(span)
            filled += len(span)
    if bucket:
        yield bucket
