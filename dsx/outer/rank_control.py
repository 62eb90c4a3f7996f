"""Rules for the rank of the low-rank codec.

What a rule measures is measured by each cluster over all of its ranks, in sums. Singular values may
differ from machine to machine in their last bits, so that the result travels in the header of the
next round, and the decision is taken from the headers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from dsx.compression.lowrank import is_low_rank
from dsx.compression.rows import matrix_shape
from dsx.compression.table import CodecTable, kind_of
from dsx.compression.wire import header_bytes
from dsx.errors import SettingsError
from dsx.outer.agreement import Agreement
from dsx.outer.spectrum import effective_rank, leading_energies
from dsx.outer.state import Progress
from dsx.settings.adapt_block import EnergyRank, PaperRank
from dsx.settings.codec_block import CompressionSettings, LowRankCodec
from dsx.settings.dsx_block import OuterSettings

_REMEMBERED_ROUNDS = 3
"""The energy rule follows the largest of the last few rounds: columns that are dropped and come
back start from random ones."""


Measures = Literal["nothing", "average", "update"]


class RankRule(Protocol):
    """Chooses one rank for all matrices."""

    measures: Measures
    """What `measure` wants to see: each matrix of the averaged pseudo-gradient, or of what the
    cluster encodes (the pseudo-gradient with its error feedback)."""

    @property
    def length(self) -> int:
        """Of what `measure` gives."""
        ...

    def prepare(self, shapes: Mapping[str, torch.Size], agreement: Agreement) -> None:
        """Learn what depends on the whole model. Collective over the cluster, once.

        Args:
            shapes: of this rank's tensors.

        Raises:
            SettingsError: the rule can't be followed with this model.
        """
        ...

    def measure(self, name: str, value: Tensor) -> list[float]:
        """What one tensor tells: `length` numbers that are summed over tensors and ranks."""
        ...

    def summary(self, totals: Sequence[float]) -> float:
        """What a cluster tells the others, from those sums; 0 when nothing was measured."""
        ...

    def clamp(self, rank: int) -> int:
        """The nearest rank that the rule allows."""
        ...

    def next_rank(self, progress: Progress, measured: Sequence[float]) -> int:
        """The rank from now on; takes note of `measured` (summaries of the contributors, in member
        order) in `progress.rank_window`."""
        ...


class FixedRule:
    """The codec's own rank; 0 stands for no low-rank codec."""

    measures: Measures = "nothing"
    length = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, shapes: Mapping[str, torch.Size], agreement: Agreement) -> None:
        pass

    def measure(self, name: str, value: Tensor) -> list[float]:
        return []

    def summary(self, totals: Sequence[float]) -> float:
        return 0.0

    def clamp(self, rank: int) -> int:
        return self._rank

    def next_rank(self, progress: Progress, measured: Sequence[float]) -> int:
        return self._rank


class PaperRule:
    """The mean effective rank of the averaged pseudo-gradient over a window (DiLoCoX, AdaGradCmp).

    The rank stays at r_1 until the window is full, and never rises.
    """

    measures: Measures = "average"
    length = 2

    def __init__(self, settings: PaperRank, compression: CompressionSettings, vocab: int | None):
        assert isinstance(compression.matrices, LowRankCodec)
        self._settings = settings
        self._first = compression.matrices.rank
        self._compression = compression
        self._vocab = vocab

    def prepare(self, shapes: Mapping[str, torch.Size], agreement: Agreement) -> None:
        pass

    def measure(self, name: str, value: Tensor) -> list[float]:
        """[effective rank, 1] of a matrix, its rank being at most r_1."""
        codec = getattr(self._compression, kind_of(value.shape, self._vocab))
        if not isinstance(codec, LowRankCodec) or value.dim() < 2:
            return [0.0, 0.0]
        matrix = value.reshape(matrix_shape(value.shape))
        energies, total = leading_energies(matrix, self._first, name)
        return [float(effective_rank(energies, total, self._settings.eps)), 1.0]

    def summary(self, totals: Sequence[float]) -> float:
        return totals[0] / totals[1] if totals[1] else 0.0

    def clamp(self, rank: int) -> int:
        return max(self._settings.min, min(rank, self._first))

    def next_rank(self, progress: Progress, measured: Sequence[float]) -> int:
        if measured:
            mean = sum(measured) / len(measured)
            progress.rank_window = [*progress.rank_window, mean][-self._settings.window :]
        if len(progress.rank_window) < self._settings.window:
            return self.clamp(progress.next_rank)
        wanted = math.ceil(sum(progress.rank_window) / len(progress.rank_window))
        return self.clamp(min(wanted, progress.next_rank))


class EnergyRule:
    """The smallest rank that keeps a share 1 - eps of what every cluster encodes, in a budget.

    A rank beyond which two factors are larger than half of the matrix keeps all of it.
    """

    measures: Measures = "update"

    def __init__(self, settings: EnergyRank, compression: CompressionSettings, vocab: int | None):
        self._settings = settings
        self._compression = compression
        self._vocab = vocab
        self._largest = 1

    @property
    def length(self) -> int:
        return self._largest + 1

    def prepare(self, shapes: Mapping[str, torch.Size], agreement: Agreement) -> None:
        """Find the largest rank that the budget allows."""
        dense_from = max((_dense_from(shape) for shape in shapes.values()), default=1)
        (most,) = agreement.maximum([float(min(dense_from, 65535))])
        sizes = payload_bytes(self._compression, shapes, self._vocab, int(most))
        sizes = [int(size) for size in agreement.total(sizes)]
        budget = self._settings.budget_bytes
        if sizes[0] > budget:
            raise SettingsError(
                f"dsx.outer.adapt.rank.budget_bytes is {budget}, but an encoded update of rank 1 "
                f"takes up to {sizes[0]} bytes; give at least that, or choose smaller codecs in "
                "dsx.outer.compression for what is not of low rank"
            )
        self._largest = sum(1 for size in sizes if size <= budget)

    def measure(self, name: str, value: Tensor) -> list[float]:
        """The energy that rank 1, 2, ... keeps, and all of it."""
        codec = getattr(self._compression, kind_of(value.shape, self._vocab))
        if not isinstance(codec, LowRankCodec) or value.dim() < 2:
            return [0.0] * self.length
        matrix = value.reshape(matrix_shape(value.shape))
        low_rank = min(self._largest, _dense_from(value.shape) - 1)
        energies, total = leading_energies(matrix, low_rank, name)
        kept = torch.cumsum(energies, dim=0).tolist()
        return [*kept, *[total] * (self.length - len(kept))]

    def summary(self, totals: Sequence[float]) -> float:
        *kept, total = totals
        if total == 0:
            return 0.0
        short = sum(1 for energy in kept if energy < (1 - self._settings.eps) * total)
        return float(min(short + 1, self._largest))

    def clamp(self, rank: int) -> int:
        return max(1, min(rank, self._largest))

    def next_rank(self, progress: Progress, measured: Sequence[float]) -> int:
        if measured:
            progress.rank_window = [*progress.rank_window, max(measured)][-_REMEMBERED_ROUNDS:]
        return self.clamp(int(max(progress.rank_window, default=progress.next_rank)))


def build_rank_rule(settings: OuterSettings, vocab_size: int | None) -> RankRule:
    """The rule that `outer.adapt.rank` describes."""
    rule, compression = settings.adapt.rank, settings.compression
    if isinstance(rule, PaperRank):
        return PaperRule(rule, compression, vocab_size)
    if isinstance(rule, EnergyRank):
        return EnergyRule(rule, compression, vocab_size)
    codec = compression.matrices
    return FixedRule(codec.rank if isinstance(codec, LowRankCodec) else 0)


def payload_bytes(
    settings: CompressionSettings,
    shapes: Mapping[str, torch.Size],
    vocab_size: int | None,
    most: int,
) -> list[int]:
    """The most bytes that an encoded update of these tensors takes at rank 1, 2, ... `most`.

    It never falls with the rank.
    """
    kinds = Counter((kind_of(shape, vocab_size), shape) for shape in shapes.values())
    heads = sum(
        header_bytes(name, shape, getattr(settings, kind_of(shape, vocab_size)))
        for name, shape in shapes.items()
    )
    table = CodecTable(settings, 0, vocab_size)
    sizes = []
    for rank in range(1, most + 1):
        table.set_rank(rank)
        bodies = sum(
            count * table.codec_for("", shape).most_bytes(shape)
            for (_, shape), count in kinds.items()
        )
        sizes.append(heads + bodies)
    return sizes


def _dense_from(shape: Sequence[int]) -> int:
    """The smallest rank at which a tensor of that shape is sent whole."""
    rows, length = matrix_shape(shape)
    guess = max(1, rows * length // (2 * (rows + length)))
    while is_low_rank(shape, guess):
        guess += 1
    return guess
