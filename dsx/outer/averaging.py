"""The weighted mean of the clusters' encoded pseudo-gradients, the same bits on every cluster.

`v_c = beta e_c + delta_c; b_c = encode(v_c); Delta = sum_c w_c decode(b_c)`, and `e_c = v_c -
decode(b_c)` once the round commits. Two patterns:

* *gather*: everybody gets everybody's bytes and decodes them in member order: C - 1 payloads in.
* *scatter*: each tensor has an owner, who decodes, sums in fp32, encodes the mean and hands it to
  all: about two payloads in, whatever C. The owner's second rounding error joins its own error
  feedback, divided by its weight, and so enters the next mean undiminished.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dsx.compression.feedback import ErrorFeedback
from dsx.compression.table import CodecTable
from dsx.errors import ExchangeError
from dsx.exchange.interface import Exchange, Membership, gather
from dsx.outer.buckets import buckets
from dsx.outer.rank_control import FixedRule, RankRule
from dsx.settings.codec_block import CompressionSettings

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
        scatter = scatters(self._pattern, contributors)
        for names in buckets(self._shapes):
            if scatter:
                self._scatter(step, names)
            else:
                self._gather(step, names)
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

    def catch_up(self, delta: Mapping[str, torch.Tensor], round_: int) -> None:
        """A round counted with this `delta` in it, but its end was not seen here: remember what
        its encoding left out. (What an owner's second rounding left out is lost.)
        """
        for name, value in delta.items():
            update = self._feedback.add(name, value)
            _, residual = self._table.encode_with_residual(name, update, round_)
            self._feedback.stage(name, residual)
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

    def _gather(self, step: "_Step", names: list[str]) -> None:
        payload = _NOTHING
        if step.delta is not None:
            payload = torch.cat([self._encode(step, name) for name in names])
        most = self._most_bytes(self._table, names)
        bundles = gather(step.exchange, len(step.shares), payload, most)
        self._mean(step, bundles, names)

    def _scatter(self, step: "_Step", names: list[str]) -> None:
        owners = self._owners(step.shares, names)
        owned = [[name for name in names if owners[name] == m] for m in range(len(step.shares))]
        payloads = [_NOTHING] * len(step.shares)
        if step.delta is not None:
            payloads = [
                torch.cat([self._encode(step, name) for name in own]) if own else _NOTHING
                for own in owned
            ]
        mine = owned[step.membership.index]
        bundles = step.exchange.all_to_all(payloads, self._most_bytes(self._table, mine))
        messages = []
        if mine:
            own_share = step.shares[step.membership.index]
            for name, mean in self._sum(step, bundles, mine).items():
                message, residual = self._mean_table.encode_with_residual(name, mean, step.round)
                self._feedback.stage(name, step.residuals.pop(name) + residual / own_share)
                messages.append(message)
        payload = torch.cat(messages) if messages else _NOTHING
        most = max(self._most_bytes(self._mean_table, own) for own in owned)
        means = gather(step.exchange, len(step.shares), payload, most)
        for member, bundle in enumerate(means):
            decoded = self._decode(self._mean_table, step, member, bundle, owned[member])
            for name, mean in decoded.items():
                self._keep(step, name, mean)

    def _most_bytes(self, table: CodecTable, names: list[str]) -> int:
        return sum(table.most_bytes(name, self._shapes[name]) for name in names)

    def _owners(self, shares: Sequence[float], names: list[str]) -> dict[str, int]:
        """Largest tensor first, each to the contributor with the fewest elements so far."""
        load = {member: 0 for member, share in enumerate(shares) if share}
        owners = {}
        for name in sorted(names, key=lambda name: (-self._shapes[name].numel(), name)):
            owners[name] = min(load, key=lambda member: (load[member], member))
            load[owners[name]] += self._shapes[name].numel()
        return owners

    # ------------------------------------------------------------------ one tensor

    def _encode(self, step: "_Step", name: str) -> torch.Tensor:
        assert step.delta is not None
        self.on_encode()
        value = self._feedback.add(name, step.delta[name])
        if self._rank_rule.measures == "update":
            self._note(step.average, name, value)
        message, residual = self._table.encode_with_residual(name, value, step.round)
        self._feedback.stage(name, residual)
        step.residuals[name] = residual
        step.average.moments.update += _square(value)
        step.average.moments.error += _square(residual)
        return message

    def _mean(self, step: "_Step", bundles: list[torch.Tensor], names: list[str]) -> None:
        for name, mean in self._sum(step, bundles, names).items():
            self._keep(step, name, mean)

    def _sum(
        self, step: "_Step", bundles: list[torch.Tensor], names: list[str]
    ) -> dict[str, torch.Tensor]:
        """sum_c w_c decode(b_c) in member order, which makes it the same bits everywhere."""
        total: dict[str, torch.Tensor] = {}
        for member, (share, bundle) in enumerate(zip(step.shares, bundles, strict=True)):
            if share == 0:
                continue
            for name, value in self._decode(self._table, step, member, bundle, names).items():
                if name in total:
                    total[name].add_(value, alpha=share)
                else:
                    total[name] = value * share
        return total

    def _decode(
        self,
        table: CodecTable,
        step: "_Step",
        member: int,
        bundle: torch.Tensor,
        names: list[str],
    ) -> dict[str, torch.Tensor]:
        sender = step.membership.clusters[member]
        expected = {name: self._shapes[name] for name in names}
        try:
            decoded = dict(table.decode(bundle, expected, step.round))
        except ExchangeError as error:
            raise ExchangeError(f"from cluster {sender}: {error}") from error
        missing = [name for name in names if name not in decoded]
        if missing:
            raise ExchangeError(
                f"cluster {sender} sent {len(decoded)} of {len(names)} tensors; the first that is "
                f"missing is {missing[0]}"
            )
        return decoded

    def _keep(self, step: "_Step", name: str, mean: torch.Tensor) -> None:
        step.average.tensors[name] = mean
        step.residuals.pop(name, None)
        moments = step.average.moments
        moments.mean += _square(mean)
        if step.delta is not None:
            delta = step.delta[name]
            moments.delta += _square(delta)
            moments.product += float(torch.dot(delta.reshape(-1), mean.reshape(-1)))


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
