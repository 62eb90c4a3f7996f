"""Which cluster trains which samples: on lease, as part of the state that all clusters share.

The corpus is one endless order of samples, at positions 0, 1, ... A cluster trains what it has on
lease. When a round is committed, all clusters decide alike, from its headers:

* what a contributor trained into its pseudo-gradient is committed, for ever;
* whoever was missing for some rounds gives back the rest of its lease;
* everybody present is dealt enough for the rounds to come, a round's worth at a time in turn: what
  was given back first, then the next positions that nobody ever had.

So every position is committed once, and none is passed over. A cluster that comes to clusters that
commit nothing, as at the start of a run, goes by a *claim*: what it would be dealt by those in
sight. The next round admits it unless somebody else was faster.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

Range = tuple[int, int]
"""Positions [start, end)."""
Ranges = list[Range]
"""Disjoint and not empty, in the order in which they are to be trained."""

LEASED_ROUNDS = 8
"""Rounds that a lease is enough for. Two are under way before a decision can be used (one on the
wire, one being trained); the others are for exchanges that fail."""

KEPT_ROUNDS = LEASED_ROUNDS
"""Committed rounds in a row that a cluster may miss, and still find its lease when it comes back.
As many as it can train meanwhile: all of that counts."""


def count(ranges: Iterable[Range]) -> int:
    """Samples in `ranges`."""
    return sum(end - start for start, end in ranges)


def split(ranges: Sequence[Range], samples: int) -> tuple[Ranges, Ranges]:
    """The first `samples` of `ranges`, and the others.

    Raises:
        ValueError: there are fewer.
    """
    if count(ranges) < samples:
        raise ValueError(f"{samples} samples are wanted of a lease of {count(ranges)}")
    first: Ranges = []
    rest: Ranges = []
    for start, end in ranges:
        middle = min(end, start + samples)
        samples -= middle - start
        first += [(start, middle)] if start < middle else []
        rest += [(middle, end)] if middle < end else []
    return first, rest


def join(ranges: Iterable[Range]) -> Ranges:
    """The same positions in the same order, in as few ranges as possible."""
    joined: Ranges = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> Ranges:
    """What is left of `ranges` after `taken` was taken out."""
    left = list(ranges)
    for start, end in taken:
        left = [
            part
            for low, high in left
            for part in ((low, min(high, start)), (max(low, end), high))
            if part[0] < part[1]
        ]
    return left


def contains(ranges: Iterable[Range], part: Sequence[Range]) -> bool:
    """Whether all of `part` is in `ranges`, each position once."""
    ranges = list(ranges)
    return count(without(ranges, part)) == count(ranges) - count(part)


@dataclass(frozen=True)
class Part:
    """What a member of a round says about its samples."""

    shard: int
    """Samples that it trains in a round."""
    trained: Sequence[Range] = ()
    """Of its lease, and in the average."""


class Leases(BaseModel):
    """The state after a committed round. A decision gives a new one and leaves this as it is."""

    model_config = ConfigDict(extra="forbid")

    frontier: int = 0
    """From here on, nobody ever had a position."""
    returned: Ranges = []
    """Positions that were given back, ascending; they are dealt first."""
    held: dict[str, Ranges] = {}
    """Positions on lease, by cluster."""
    missed: dict[str, int] = {}
    """Committed rounds in a row without a cluster that has a lease."""
    committed: dict[str, Ranges] = {}
    """What the round committed, by cluster."""
    parent: str = ""
    """`history` after the round before."""
    history: str = ""
    """Digest of all that was ever decided."""

    def admit(self, claims: Mapping[str, Ranges]) -> "Leases":
        """With the claims of clusters that hold nothing, in the order given, as far as nobody has
        these positions."""
        after = self.model_copy(deep=True)
        top = max((end for claim in claims.values() for _, end in claim), default=0)
        free = [*self.returned, (self.frontier, max(self.frontier, top))]
        for name, claim in claims.items():
            if claim and name not in after.held and contains(free, claim):
                free = without(free, claim)
                after.held[name] = claim
                after.frontier = max(after.frontier, *(end for _, end in claim))
        after.returned = without(join(free), [(after.frontier, max(after.frontier, top))])
        return after

    def commit(self, parts: Mapping[str, Part]) -> "Leases":
        """After a round with these members, in member order.

        Raises:
            ValueError: one of them trained what it had not on lease.
        """
        after = self.model_copy(deep=True)
        after.committed = {}
        away = [name for name in self.held if name not in parts]
        after.missed = {name: self.missed.get(name, 0) + 1 for name in away}
        for name in away:
            if after.missed[name] > KEPT_ROUNDS:
                del after.missed[name]
                after._give_back(after.held.pop(name))
        for name, part in parts.items():
            held = after.held.pop(name, [])
            if not contains(held, part.trained):
                raise ValueError(f"cluster {name} has {held} on lease and trained {part.trained}")
            if part.trained:
                after.committed[name] = join(sorted(part.trained))
            if rest := without(held, part.trained):
                after.held[name] = rest
        after = after.deal({name: part.shard for name, part in parts.items()})
        after.parent = self.history
        decided = json.dumps(after.model_dump(exclude={"history"}), sort_keys=True)
        after.history = hashlib.blake2b(decided.encode(), digest_size=16).hexdigest()
        return after

    def deal(self, shards: Mapping[str, int]) -> "Leases":
        """With enough on lease for some rounds, by samples of a round and cluster, in turn."""
        after = self.model_copy(deep=True)
        for rounds in range(1, LEASED_ROUNDS + 1):
            for name, shard in shards.items():
                held = after.held.get(name, [])
                missing = rounds * shard - count(held)
                if missing > 0:
                    after.held[name] = join([*held, *after._take(missing)])
        return after

    def _take(self, samples: int) -> Ranges:
        first, self.returned = split(self.returned, min(samples, count(self.returned)))
        start, self.frontier = self.frontier, self.frontier + samples - count(first)
        return first + ([(start, self.frontier)] if start < self.frontier else [])

    def _give_back(self, ranges: Ranges) -> None:
        self.returned = join(sorted([*self.returned, *ranges]))
