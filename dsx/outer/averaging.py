"""The weighted mean of the clusters' encoded pseudo-gradients, the same bits on every cluster.

`v_c = beta e_c + delta_c; b_c = encode(v_c); Delta = sum_c w_c decode(b_c)`, and `e_c = v_c -
decode(b_c)` once the round commits. Two patterns:

* *gather*: everybody gets everybody's bytes and decodes them in member order: C - 1 payloads in.
* *scatter*: each piece (`dsx.outer.pieces`) has an owner, who decodes, sums in fp32, encodes the
  mean and hands it to all: about two payloads in, whatever C. The owner's second rounding error
  joins its own error feedback, divided by its weight, and so enters the next mean undiminished.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dsx.compression.feedback import ErrorFeedback
from dsx.compression.table import CodecTable
from dsx.errors import ExchangeError
from dsx.exchange.interface import Exchange, Membership, gather
from dsx.outer.buckets import buckets
from dsx.outer.pieces import Piece, deal
from dsx.outer.rank_control import FixedRule, RankRule
from dsx.settings.codec_block import CompressionSettings
from dsx.spans import span

# From here on two payloads in are fewer than C - 1.
_SCATTER_FROM = 4
_NOTHING = torch.empty(0, dtype=torch.uint8)


def scatters(pattern: Literal["auto", "gather", "scatter"], contributors: int) -> bool:
    """Whether `pattern` (`compression.averaging`) means owners for so many contributors."""
    return pattern == "scatter" or (pattern == "auto" and contributors >= _SCATTER_FROM)


@dataclass
class Moments:
    """Sums of squares and products over this rank's share; what diagnostics are made of."""

    update: float = 0.0
    """||v||^2, v being what was encoded."""
    error: float = 0.0
    """||v - decode(encode(v))||^2."""
    delta: float = 0.0
    """||delta||^2 of the own pseudo-gradient."""
    mean: float = 0.0
    """||Delta||^2 of the average."""
    product: float = 0.0
    """delta . Delta."""

    def values(self) -> list[float]:
        return [self.update, self.error, self.delta, self.mean, self.product]


@dataclass
class Average:
    """Delta by name (fp32, CPU), and the moments it was taken with."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: Moments = field(default_factory=Moments)
    measured: list[float] = field(default_factory=list)
    """What the rank rule measured, summed over this rank's tensors."""


class Averager:
    """Averages one pseudo-gradient after the other; remembers what encodings left out.

    Args:
        shapes: names and shapes of the outer group's tensors.
        seed: of the codecs that need one.
        vocab_size: rows of the embedding; tells embeddings from other matrices.
        rank_rule: what is to be measured for the choice of the next ranks.

    Attributes:
        on_encode: called before each tensor is encoded.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        shapes: Mapping[str, torch.Size],
        seed: int,
        vocab_size: int | None,
        rank_rule: RankRule | None = None,
    ) -> None:
        self.on_encode: Callable[[], None] = lambda: None
        self._rank_rule = rank_rule or FixedRule(0)
        self._pattern = settings.averaging
        self._shapes = dict(shapes)
        self._table = CodecTable(settings, seed, vocab_size)
        # An owner encodes means of tensors of which it encodes its own update, too.
        self._mean_table = CodecTable(settings, seed, vocab_size)
        self._feedback = ErrorFeedback(settings.feedback_decay)

    def average(
        self,
        exchange: Exchange,
        membership: Membership,
        shares: Sequence[float],
        delta: Mapping[str, torch.Tensor] | None,
        round_: int,
    ) -> Average:
        """Delta of one round. Collective; changes nothing before `commit`.

        Args:
            shares: w_c per member; a member of share 0 sends nothing and receives the average.
            delta: own pseudo-gradient, fp32 on the CPU; None where the own share is 0.
            round_: number of the round, which every message carries.

        Raises:
            ExchangeError: a peer was lost, or sent something that can't be used.
        """
        average = Average(measured=[0.0] * self._rank_rule.length)
        step = _Step(exchange, membership, shares, delta, round_, average)
        if len(membership) == 1 and delta is not None:
            self._alone(step, delta)
            return step.average
        contributors = sum(1 for share in shares if share)
        for names in buckets(self._shapes):
            dealt = iter(self._deal(names, contributors))
            if scatters(self._pattern, contributors):
                self._scatter(step, [next(dealt) if share else [] for share in shares])
            else:
                self._gather(step, next(dealt))
        return step.average

    def set_rank(self, rank: int) -> None:
        """Encode with another rank from now on; all tensors whose codec is of low rank."""
        self._table.set_rank(rank)
        self._mean_table.set_rank(rank)

    def measure(self, average: Average) -> None:
        """Let a rank rule that looks at averages look at this one."""
        if self._rank_rule.measures == "average":
            for name, value in average.tensors.items():
                self._note(average, name, value)

    def commit(self) -> None:
        """The round counts: error feedback and codecs take over what they staged."""
        self._feedback.commit()
        self._table.commit()
        self._mean_table.commit()

    def discard(self) -> None:
        """The round does not count."""
        self._feedback.discard()
        self._table.discard()
        self._mean_table.discard()

    def catch_up(self, delta: Mapping[str, torch.Tensor], round_: int, contributors: int) -> None:
        """A round of so many contributors counted with this `delta` in it, but its end was not seen
        here: remember what its encoding left out. (What an owner's second rounding left out is
        lost.)
        """
        for names in buckets(self._shapes):
            everything = itertools.chain(*self._deal(names, contributors))
            for name, parts in itertools.groupby(everything, _name):
                self._encode(name, self._feedback.add(name, delta[name]), parts, round_)
        self.commit()

    def without_residual(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """`value - e` of one tensor; `value` itself while nothing was left out."""
        return self._feedback.subtract(name, value)

    def residual_square(self) -> float:
        """||e||^2 of this rank's error feedback."""
        return self._feedback.norm() ** 2

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Error feedback and codec state; fp32 CPU tensors, not copies."""
        parts = {
            "feedback": self._feedback.state_dict(),
            "codec": self._table.state_dict(),
            "mean_codec": self._mean_table.state_dict(),
        }
        return {
            f"{part}/{key}": value for part, kept in parts.items() for key, value in kept.items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave."""

        def part(name: str) -> dict[str, torch.Tensor]:
            prefix = f"{name}/"
            return {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }

        self._feedback.load_state_dict(part("feedback"))
        self._table.load_state_dict(part("codec"))
        self._mean_table.load_state_dict(part("mean_codec"))

    def _alone(self, step: "_Step", delta: Mapping[str, torch.Tensor]) -> None:
        """Nobody to send to: nothing is encoded, and what earlier encodings left out comes in."""
        for name, value in delta.items():
            update = self._feedback.add(name, value)
            self._feedback.stage(name, torch.zeros_like(update))
            step.average.moments.update += _square(update)
            if self._rank_rule.measures == "update":
                self._note(step.average, name, update)
            self._keep(step, name, update)

    def _note(self, average: Average, name: str, value: torch.Tensor) -> None:
        seen = self._rank_rule.measure(name, value)
        average.measured = [a + b for a, b in zip(average.measured, seen, strict=True)]

    # ------------------------------------------------------------------ the two patterns

    def _gather(self, step: "_Step", pieces: list[Piece]) -> None:
        with span("encode"):
            payload = _joined(self._encode_own(step, pieces))
        most = self._most_bytes(self._table, pieces)
        bundles = gather(step.exchange, len(step.shares), payload, most)
        for piece, mean in self._sum(step, bundles, pieces):
            self._keep(step, piece.name, mean)

    def _scatter(self, step: "_Step", dealt: list[list[Piece]]) -> None:
        with span("encode"):
            messages = iter(self._encode_own(step, itertools.chain(*dealt)))
        payloads = [_joined(list(itertools.islice(messages, len(own)))) for own in dealt]
        mine = dealt[step.membership.index]
        bundles = step.exchange.all_to_all(payloads, self._most_bytes(self._table, mine))
        own_share = step.shares[step.membership.index]
        means = []
        for piece, mean in self._sum(step, bundles, mine):
            message, residual = self._encode_piece(self._mean_table, piece, mean, step.round)
            piece.of(step.residuals[piece.name]).add_(residual / own_share)
            self._feedback.stage(piece.name, step.residuals[piece.name])
            means.append(message)
        most = max(self._most_bytes(self._mean_table, own) for own in dealt)
        bundles = gather(step.exchange, len(step.shares), _joined(means), most)
        decoded = (
            piece_and_mean
            for member, own in enumerate(dealt)
            for piece_and_mean in self._decode(self._mean_table, step, member, bundles[member], own)
        )
        for name, parts in itertools.groupby(decoded, lambda part: part[0].name):
            self._keep(step, name, _rows([mean for _, mean in parts]))

    def _deal(self, names: list[str], contributors: int) -> list[list[Piece]]:
        """What each contributor averages; everything is one share where nobody owns anything."""
        if not scatters(self._pattern, contributors):
            return [[Piece(name) for name in names]]

        def divisible(name: str) -> bool:
            return self._table.encodes_rows_apart(self._shapes[name])

        return deal(self._shapes, names, contributors, divisible)

    def _most_bytes(self, table: CodecTable, pieces: Sequence[Piece]) -> int:
        return sum(
            table.most_bytes(
                piece.label, piece.shape(self._shapes[piece.name]), self._shapes[piece.name]
            )
            for piece in pieces
        )

    # ------------------------------------------------------------------ one tensor

    def _encode_own(self, step: "_Step", pieces: Iterable[Piece]) -> list[torch.Tensor]:
        """A message for each piece of the own update; none where there is nothing to send.

        `pieces`: of whole tensors, those of a tensor one after the other.
        """
        if step.delta is None:
            return []
        messages = []
        for name, parts in itertools.groupby(pieces, _name):
            self.on_encode()
            value = self._feedback.add(name, step.delta[name])
            if self._rank_rule.measures == "update":
                self._note(step.average, name, value)
            made, residual = self._encode(name, value, parts, step.round)
            messages += made
            step.residuals[name] = residual
            step.average.moments.update += _square(value)
            step.average.moments.error += _square(residual)
        return messages

    def _encode(
        self, name: str, value: torch.Tensor, parts: Iterable[Piece], round_: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The messages about all pieces of one tensor, and what they leave out, which is staged."""
        encoded = [self._encode_piece(self._table, part, part.of(value), round_) for part in parts]
        residual = _rows([residual for _, residual in encoded])
        self._feedback.stage(name, residual)
        return [message for message, _ in encoded], residual

    def _encode_piece(
        self, table: CodecTable, piece: Piece, value: torch.Tensor, round_: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self._shapes[piece.name]
        return table.encode_with_residual(piece.label, value, round_, whole=whole)

    def _sum(
        self, step: "_Step", bundles: list[torch.Tensor], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Piece, torch.Tensor]]:
        """sum_c w_c decode(b_c) in member order, which makes it the same bits everywhere."""
        total: dict[Piece, torch.Tensor] = {}
        for member, (share, bundle) in enumerate(zip(step.shares, bundles, strict=True)):
            if share == 0:
                continue
            for piece, value in self._decode(self._table, step, member, bundle, pieces):
                if piece in total:
                    total[piece].add_(value, alpha=share)
                else:
                    total[piece] = value * share
        yield from total.items()

    def _decode(
        self,
        table: CodecTable,
        step: "_Step",
        member: int,
        bundle: torch.Tensor,
        pieces: Sequence[Piece],
    ) -> list[tuple[Piece, torch.Tensor]]:
        """What a member sent about these pieces, in their order."""
        sender = step.membership.clusters[member]
        expected = {piece.label: piece.shape(self._shapes[piece.name]) for piece in pieces}
        try:
            decoded = dict(table.decode(bundle, expected, step.round))
        except ExchangeError as error:
            raise ExchangeError(f"from cluster {sender}: {error}") from error
        missing = [label for label in expected if label not in decoded]
        if missing:
            raise ExchangeError(
                f"cluster {sender} sent {len(decoded)} of {len(pieces)} tensors; the first that is "
                f"missing is {missing[0]}"
            )
        return [(piece, decoded[piece.label]) for piece in pieces]

    def _keep(self, step: "_Step", name: str, mean: torch.Tensor) -> None:
        step.average.tensors[name] = mean
        step.residuals.pop(name, None)
        moments = step.average.moments
        moments.mean += _square(mean)
        if step.delta is not None:
            delta = step.delta[name]
            moments.delta += _square(delta)
            moments.product += float(torch.dot(delta.reshape(-1), mean.reshape(-1)))


def _name(piece: Piece) -> str:
    return piece.name


def _joined(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(messages)) if messages else _NOTHING


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor again, from its pieces."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass
class _Step:
    """One call of `Averager.average`."""

    exchange: Exchange
    membership: Membership
    shares: Sequence[float]
    delta: Mapping[str, torch.Tensor] | None
    round: int
    average: Average
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)


def _square(value: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2
