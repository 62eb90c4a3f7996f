"""The order in which samples are trained on: a keyed permutation per epoch, computed by index.

A shuffled index of every block would cost 8 bytes per block on every rank and depend on a library's
random stream. A small Feistel network over the index needs no memory, gives the sample at any
position at once (so resuming is free), and is the same on every machine and version.
"""

import hashlib

_MASK64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 8


def _mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijective 64-bit hash."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """64-bit keys of the Feistel rounds, independent for every (seed, epoch)."""
    return tuple(
        int.from_bytes(
            hashlib.blake2b(f"dsx order {seed} {epoch} {index}".encode(), digest_size=8).digest(),
            "little",
        )
        for index in range(_FEISTEL_ROUNDS)
    )


class SampleOrder:
    """`order[position]` is the block trained on at that position; a pure function of its inputs.

    Positions [e * count, (e + 1) * count) are epoch e: every block once, each epoch in another
    order. Position has no upper bound.

    Args:
        count: blocks to order, at least 1.
        seed: the run's seed; the same seed gives the same order everywhere.

    Raises:
        ValueError: `count` is below 1.
    """

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"an order needs at least 1 block, not {count}")
        self.count = count
        self.seed = seed
        # Two halves of equal width: the domain is at most 4 times `count`, and walking the cycle
        # until the value is below `count` restricts the permutation to it.
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        self._epoch = 0
        self._keys = _round_keys(seed, 0)

    def __getitem__(self, position: int) -> int:
        """The block index, in [0, count), at `position` (0 or more).

        Raises:
            IndexError: `position` is negative.
        """
        if position < 0:
            raise IndexError(f"sample positions start at 0; {position} is before it")
        epoch, value = divmod(position, self.count)
        if epoch != self._epoch:
            self._epoch, self._keys = epoch, _round_keys(self.seed, epoch)
        value = self._permute(value)
        while value >= self.count:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix64(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right
