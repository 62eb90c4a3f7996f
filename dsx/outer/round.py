"""One round's exchange, from membership to the outer step: what runs in the background."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Exchange, Membership, gather
from dsx.outer.averaging import Average, Averager, Moments
from dsx.outer.control import Control, Observed
from dsx.outer.digest import join_digests
from dsx.outer.header import LONGEST, Header, check_headers
from dsx.outer.identity import Identity, refuse_others
from dsx.outer.state import SharedState, hand_over

log = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_SECONDS = 2.0
"""Between two attempts: together they outlast the 5 s after which torchft takes a cluster that is
gone for lost."""


@dataclass(frozen=True)
class Contribution:
    """What a cluster brings to a round; `delta` is None while it starts or has nothing sound."""

    delta: Mapping[str, torch.Tensor] | None
    tokens: int
    step_seconds: float
    exchange_seconds: float
    measured_rank: float = 0.0
    """What the rank rule saw in the cluster's last round; 0: nothing."""
    step: int = 0
    """Inner step of the run at which `delta` was taken."""
    starting: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a round ended."""

    committed: bool
    """The average was applied to theta, everywhere alike."""
    cluster: str
    """This cluster's own name."""
    clusters: tuple[str, ...]
    """Who took part, those included that only received."""
    contributors: tuple[str, ...]
    share: float
    """Own weight w_c in the average."""
    exchange_seconds: float
    """From the agreed membership to the commit."""
    slowest_exchange: float
    """Largest `exchange_seconds` that the contributors reported of their last round."""
    fastest_step: float
    """Smallest `step_seconds` of the contributors."""
    theta_digest: list[int]
    """This rank's contribution to the digest of theta, after the round."""
    moments: Moments
    measured: list[float]
    """What the rank rule measured on this rank, in sums."""


class RoundExchange:
    """Brings one contribution after the other through the exchange into the shared state.

    Attributes:
        lock: held whenever the shared state or the averager's memory changes.

    Args:
        identity: what members must have in common.
        min_clusters: contributors below which a round is not committed.
        control: decides on the rounds to come.
        clock: seconds, of which differences are taken.
    """

    def __init__(
        self,
        state: SharedState,
        exchange: Exchange,
        averager: Averager,
        identity: Identity,
        min_clusters: int,
        control: Control,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._exchange = exchange
        self._averager = averager
        self._identity = identity
        self._min_clusters = min_clusters
        self._control = control
        self._clock = clock
        self.lock = threading.Lock()
        self.rehash()

    def run(self, contribution: Contribution) -> Outcome:
        """One round; a failed transfer is repeated with whoever is left.

        Raises:
            ExchangeRefused: a member trains something else.
            ExchangeError: the exchange failed several times in a row.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._attempt(contribution)
            except ExchangeError as error:
                self._give_up()
                # Who starts and is refused has come to the wrong run. Who runs was disturbed by
                # somebody like that, and goes on when that one has left.
                refused = isinstance(error, ExchangeRefused) and contribution.starting
                if refused or attempt == _ATTEMPTS:
                    raise
                log.warning("round %d is repeated: %s", self._state.progress.round, error)
            time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _give_up(self) -> None:
        self._averager.discard()
        self._exchange.commit(False)

    def rehash(self) -> None:
        """The shared state has changed: take its digests anew."""
        self.theta_digest, self.momentum_digest = self._state.digests()
        # Equal within an outer group after every round (I1); sent with every header.
        self._digest = join_digests(self.theta_digest) + join_digests(self.momentum_digest)

    def _attempt(self, contribution: Contribution) -> Outcome:
        membership = self._exchange.join()
        began = self._clock()
        headers = self._exchange_headers(membership, contribution)
        newest = max(header.round for header in headers)
        self._bring_up_to_date(membership, headers, newest)
        if self._control.changes_rank:
            self._averager.set_rank(self._state.progress.rank)
        running = [not header.starting for header in headers]
        tokens = [header.tokens if header.round == newest else 0 for header in headers]
        shares = [count / max(1, sum(tokens)) for count in tokens]
        contributors = tuple(
            name for name, share in zip(membership.clusters, shares, strict=True) if share
        )
        delta = contribution.delta if shares[membership.index] else None
        average = Average()
        if contributors:
            average = self._averager.average(self._exchange, membership, shares, delta, newest)
        enough = len(contributors) >= self._min_clusters
        committed = self._exchange.commit(True) and enough
        if committed:
            with self.lock:
                self._averager.commit()
                self._state.optimizer.step(average.tensors)
                self._state.progress.round += 1
                self._state.progress.tokens_total += sum(tokens)
                self._state.progress.contributors = {
                    name: count
                    for name, count in zip(membership.clusters, tokens, strict=True)
                    if count
                }
                observed = _observed(membership.clusters, headers, contributors)
                self._control.decide(self._state.progress, observed)
                self.rehash()
        else:
            self._averager.discard()
        if not committed and any(running):
            log.warning(
                "round %d was not committed: %d contributing clusters, at least %d are needed",
                newest,
                len(contributors),
                self._min_clusters,
            )
        seconds = self._clock() - began
        if committed:
            self._averager.measure(average)
        return Outcome(
            committed=committed,
            cluster=membership.name,
            clusters=membership.clusters,
            contributors=contributors,
            share=shares[membership.index],
            exchange_seconds=seconds,
            slowest_exchange=_slowest_exchange(headers),
            fastest_step=_fastest_step(headers),
            theta_digest=self.theta_digest,
            moments=average.moments,
            measured=average.measured,
        )

    def _exchange_headers(self, membership: Membership, contribution: Contribution) -> list[Header]:
        own = Header(
            identity=self._identity.digest,
            round=self._state.progress.round,
            shared_digest=self._digest,
            starting=contribution.starting,
            tokens=contribution.tokens,
            step_seconds=contribution.step_seconds,
            exchange_seconds=contribution.exchange_seconds,
            measured_rank=contribution.measured_rank,
            step=contribution.step,
        )
        messages = gather(self._exchange, len(membership), own.to_bytes(), LONGEST)
        headers = [
            Header.from_bytes(message, name)
            for name, message in zip(membership.clusters, messages, strict=True)
        ]
        refuse_others(self._exchange, membership, headers, self._identity)
        check_headers(headers, membership.clusters)
        return headers

    def _bring_up_to_date(self, membership: Membership, headers: list[Header], newest: int) -> None:
        behind = [index for index, header in enumerate(headers) if header.round < newest]
        if not behind:
            return
        source = next(index for index, header in enumerate(headers) if header.round == newest)
        handed = hand_over(self._exchange, membership, self._state, source, behind)
        if handed is not None:
            with self.lock:
                self._state.load(*handed)
                self.rehash()
            log.warning(
                "took the shared state of round %d from cluster %s",
                newest,
                membership.clusters[source],
            )


def _slowest_exchange(headers: Sequence[Header]) -> float:
    return max(header.exchange_seconds for header in headers)


def _fastest_step(headers: Sequence[Header]) -> float:
    return min((h.step_seconds for h in headers if h.step_seconds > 0), default=0.0)


def _observed(
    clusters: Sequence[str], headers: Sequence[Header], contributors: Sequence[str]
) -> Observed:
    own = {n: h for n, h in zip(clusters, headers, strict=True) if n in contributors}
    return Observed(
        exchange_seconds=_slowest_exchange(headers),
        step_seconds=_fastest_step(headers),
        ranks=[header.measured_rank for header in own.values() if header.measured_rank > 0],
        paces={name: h.step_seconds for name, h in own.items() if h.step_seconds > 0},
        step=max(header.step for header in own.values()),
    )
