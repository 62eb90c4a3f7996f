"""One round's exchange, from membership to the outer step: what runs in the background.

It is committed on all ranks of all clusters that take part, or on none. The ranks of a cluster do
everything together, or fail together (`_all_ranks`). Clusters that are ready tell each other; one
that hears from all commits. One that does not hear from all can't know whether the others have
committed, and keeps what it sent *in doubt*: it then learns from the first newer state that it is
handed whether its pseudo-gradient is in there. Until then it is repeated like any that failed.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.exchange.interface import Exchange, Membership, Vote, gather
from dsx.outer.averaging import Average, Averager, Moments
from dsx.outer.control import Control, Observed
from dsx.outer.deadlines import Deadlines
from dsx.outer.header import LONGEST, Header, check_headers, find_newest
from dsx.outer.identity import Identity, refuse_others
from dsx.outer.leases import Leases, Part, Ranges, contains, without
from dsx.outer.state import SharedState, hand_over
from dsx.settings.dsx_block import OuterSettings
from dsx.spans import span

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS = 0.5
"""Between two attempts."""
_READY = torch.tensor([Vote.YES], dtype=torch.uint8)


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
    trained: Ranges = field(default_factory=list)
    """Samples in `delta`."""
    claim: Ranges = field(default_factory=list)
    """All samples that the cluster has, or goes by while the shared state has no lease for it."""
    digest: str = ""
    """Of the shared state that the cluster holds, over all its ranks."""
    starting: bool = False


_NOTHING = Contribution(None, 0, 0.0, 0.0, starting=True)


@dataclass(frozen=True)
class Outcome:
    """How a round ended."""

    committed: bool
    """An average was applied to theta, everywhere alike."""
    cluster: str
    """This cluster's own name."""
    clusters: tuple[str, ...]
    """Who took part, those included that only received; nobody when it failed."""
    contributors: tuple[str, ...] = ()
    share: float = 0.0
    """Own weight w_c in the average."""
    exchange_seconds: float = 0.0
    """From the agreed membership to the commit."""
    slowest_exchange: float = 0.0
    """Largest `exchange_seconds` that the contributors reported of their last round."""
    fastest_step: float = 0.0
    """Smallest `step_seconds` of the contributors."""
    theta_digest: list[int] = field(default_factory=list)
    """This rank's contribution to the digest of theta, after the round."""
    moments: Moments = field(default_factory=Moments)
    measured: list[float] = field(default_factory=list)
    """What the rank rule measured on this rank, in sums."""
    healed: bool = False
    """The shared state was taken over from another cluster."""
    unsent: Mapping[str, torch.Tensor] | None = None
    """What of the own pseudo-gradient is not in theta."""
    unsent_tokens: int = 0
    """Trained into `unsent`."""
    unsent_samples: Ranges = field(default_factory=list)
    """Likewise."""
    claim: Ranges | None = None
    """What the cluster may train while the shared state has no lease for it, from now on."""
    diverged: bool = False
    """The state that was taken over has the place of one that should have been the same."""
    problem: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class _Doubt:
    """A contribution that the others may have committed."""

    contribution: Contribution
    round: int
    rank: int
    contributors: int


class RoundExchange:
    """Brings one contribution after the other through the exchange into the shared state.

    Attributes:
        lock: held whenever the shared state or the averager's memory changes.
        on_phase: called with what this rank does in a round, at the moment it begins: "join",
            "headers", "heal", "encode" (a tensor), "transfer", "transferred", "vote", "commit".
            "headers", "heal", "transfer" and "vote" come when a message is on its way.

    Args:
        identity: what members must have in common.
        settings: say how many contributors a round needs, and what diverged clusters do.
        step_samples: that this cluster trains in an inner step.
        control: decides on the rounds to come.
        deadlines: say how long to wait.
        clock: seconds, of which differences are taken.
    """

    def __init__(
        self,
        state: SharedState,
        exchange: Exchange,
        averager: Averager,
        identity: Identity,
        settings: OuterSettings,
        step_samples: int,
        control: Control,
        deadlines: Deadlines,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._exchange = exchange
        self._averager = averager
        self._identity = identity
        self._min_clusters = settings.min_clusters
        self._on_divergence = settings.on_divergence
        self._step_samples = step_samples
        self._control = control
        self._deadlines = deadlines
        self._clock = clock
        self._left = _NOTHING
        self._digest = ""
        self._doubts: list[_Doubt] = []
        self._healed = self._diverged = False
        self._met_nobody = False
        self._moving = ""
        self._usual_bytes = 0
        self.lock = threading.Lock()
        self.on_phase: Callable[[str], None] = lambda phase: None
        exchange.on_posted = lambda: self.on_phase(self._moving)
        averager.on_encode = lambda: self.on_phase("encode")
        self.rehash()

    def run(self, contribution: Contribution) -> Outcome:
        """One round; what failed is repeated with whoever is left, for a limited time.

        Raises:
            ExchangeRefused: a member trains something else.
        """
        began = time.monotonic()
        # A coordinator that was away for a whole round is waited for no more.
        limit = 0.0 if self._met_nobody else self._deadlines.round(self._state.progress)
        self._left, self._digest = contribution, contribution.digest
        self._healed = self._diverged = False
        self._met_nobody = True
        told = ""
        while True:
            try:
                outcome = self._attempt()
                break
            except ExchangeError as error:
                refused = isinstance(error, ExchangeRefused)
                # Who starts and is refused has come to the wrong run. Who runs was disturbed by
                # somebody like that, and goes on when that one has left.
                if refused and contribution.starting:
                    raise
                # Who was met is tried again; a coordinator that is away is not waited for as long,
                # but by those who have nothing else to do.
                most = limit
                if self._met_nobody:
                    shortest = min(limit, self._deadlines.shortest)
                    most = self._deadlines.longest if contribution.starting else shortest
                late = time.monotonic() - began > most
                vote, _ = self._exchange.agree(Vote.FAILED if late else Vote.YES)
                if vote is Vote.FAILED:
                    if refused:
                        raise
                    outcome = Outcome(False, "", (), problem=str(error))
                    break
                if str(error) != told:
                    log.warning("round %d is repeated: %s", self._state.progress.round, error)
                told = str(error)
            time.sleep(_PAUSE_SECONDS)
        if outcome.share == 0:
            rest = self._left
            outcome = replace(
                outcome,
                unsent=rest.delta,
                unsent_tokens=rest.tokens,
                unsent_samples=rest.trained,
            )
        self._left = _NOTHING
        return replace(outcome, healed=self._healed, diverged=self._diverged)

    def rehash(self) -> None:
        """The shared state has changed: take its digests anew."""
        self.theta_digest, self.momentum_digest = self._state.digests()

    def _attempt(self) -> Outcome:
        progress = self._state.progress
        longest = self._deadlines.longest
        self.on_phase("join")
        self._exchange.limit_seconds = self._deadlines.header(progress)
        starting = self._left.starting
        membership = self._exchange.join(longest if starting else self._deadlines.quorum(progress))
        self._met_nobody = False
        began = self._clock()
        self._moving = "headers"
        headers = self._all_ranks(lambda: self._exchange_headers(membership))
        source, behind = find_newest(headers, membership.clusters, self._on_divergence)
        times = self._bring_up_to_date(membership, headers, source, behind)
        progress = self._state.progress
        if progress.round == 0:
            progress.began = min(header.began or membership.number for header in headers)
        leases = progress.leases.admit(
            {name: h.claim for name, h in zip(membership.clusters, headers, strict=True)}
        )
        if self._control.changes_rank:
            self._averager.set_rank(progress.rank)
        # What was trained on another state, or on samples that are not the sender's, waits or goes.
        tokens = [
            header.tokens
            if index not in behind and contains(leases.held.get(name, []), header.trained)
            else 0
            for index, (name, header) in enumerate(zip(membership.clusters, headers, strict=True))
        ]
        shares = [count / max(1, sum(tokens)) for count in tokens]
        contributors = tuple(
            name for name, share in zip(membership.clusters, shares, strict=True) if share
        )
        committed = len(contributors) >= self._min_clusters
        average = Average()
        if committed:
            self._exchange.limit_seconds = self._deadlines.payload(progress, times)
            with span("exchange"):
                average = self._average(membership, shares)
            self._commit(membership, headers, tokens, average, leases)
        elif any(header.tokens for header in headers):  # at the end, nobody may have anything
            log.warning(
                "round %d was not committed: %d contributing clusters, at least %d are needed",
                progress.round,
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
            share=shares[membership.index] if committed else 0.0,
            exchange_seconds=seconds,
            slowest_exchange=_slowest_exchange(headers),
            fastest_step=_fastest_step(headers),
            theta_digest=self.theta_digest,
            moments=average.moments,
            measured=average.measured,
            claim=None if committed else self._claim(membership, headers, leases),
        )

    def _claim(
        self, membership: Membership, headers: Sequence[Header], leases: Leases
    ) -> Ranges | None:
        """What this cluster may train without a lease, from what everybody in sight has."""
        progress = self._state.progress
        shards = {
            name: progress.round_samples(header.step_samples)
            for name, header in zip(membership.clusters, headers, strict=True)
            if name not in leases.held
        }
        return leases.deal(shards).held.get(membership.name) if membership.name in shards else None

    def _all_ranks(self, work: Callable[[], T]) -> T:
        """What `work` returns, when it succeeds on all ranks of this cluster (collective).

        Raises:
            ExchangeError: on all of them, when it did not on one.
        """
        result: T | None = None
        vote, why = Vote.YES, ""
        try:
            result = work()
        except ExchangeRefused as error:
            vote, why = Vote.REFUSED, str(error)
        except ExchangeError as error:
            vote, why = Vote.FAILED, str(error)
        self._require(vote, why)
        return cast(T, result)

    def _require(self, vote: Vote, why: str) -> None:
        """Go on when all ranks of this cluster vote yes. Raises ExchangeError on all of them."""
        vote, why = self._exchange.agree(vote, why)
        if vote is Vote.YES:
            return
        self._exchange.reset()
        self._averager.discard()
        raise (ExchangeRefused if vote is Vote.REFUSED else ExchangeError)(why)

    def _exchange_headers(self, membership: Membership) -> list[Header]:
        contribution, progress = self._left, self._state.progress
        own = Header(
            identity=self._identity.digest,
            round=progress.round,
            met=progress.met,
            began=progress.began,
            shared_digest=self._digest,
            starting=contribution.starting,
            tokens=contribution.tokens,
            step_seconds=contribution.step_seconds,
            exchange_seconds=contribution.exchange_seconds,
            measured_rank=contribution.measured_rank,
            step=contribution.step,
            step_samples=self._step_samples,
            trained=contribution.trained,
            claim=contribution.claim,
        )
        messages = gather(self._exchange, len(membership), own.to_bytes(), LONGEST)
        headers = [
            Header.from_bytes(message, name)
            for name, message in zip(membership.clusters, messages, strict=True)
        ]
        refuse_others(self._exchange, membership, headers, self._identity)
        check_headers(headers, membership.clusters, membership.index)
        return headers

    # ------------------------------------------------------------------ who is behind

    def _bring_up_to_date(
        self, membership: Membership, headers: list[Header], source: int, behind: list[int]
    ) -> float:
        """Hand the newest state to whoever is behind.

        Returns:
            how many times as long as usual the round's messages may take.
        """
        if not behind:
            return 1.0
        times = 1.0 + self._state.bytes / max(1, self._usual_bytes)
        self._moving = "heal"
        self._exchange.limit_seconds = self._deadlines.payload(self._state.progress, times)
        handed = self._all_ranks(
            lambda: hand_over(self._exchange, membership, self._state, source, behind)
        )
        if handed is not None:
            with self.lock:
                self._state.load(*handed)
                self._healed = True
                self._settle_doubts(membership.name)
                self.rehash()
            newest, own = headers[source], headers[membership.index]
            if own.version == newest.version:
                log.warning(
                    "the shared state here had diverged after round %d: digest %s, but %s on "
                    "cluster %s",
                    *(own.round, own.shared_digest, newest.shared_digest),
                    membership.clusters[source],
                )
                self._diverged = True
                self._left = replace(self._left, delta=None, tokens=0, trained=[])
            self._digest = newest.shared_digest
            log.warning(
                "took the shared state of round %d from cluster %s",
                newest.round,
                membership.clusters[source],
            )
        return times

    def _settle_doubts(self, cluster: str) -> None:
        """The state that was handed over tells which contribution of this cluster is in it."""
        counted = self._state.progress.counted.get(cluster)
        for doubt in self._doubts:
            sent = doubt.contribution
            if counted != (doubt.round, sent.step) or sent.delta is None:
                continue
            if self._control.changes_rank:
                self._averager.set_rank(doubt.rank)
            self._averager.catch_up(sent.delta, doubt.round, doubt.contributors)
            left = self._left
            rest = None
            if left.delta is not None and left.step != sent.step:
                # It holds what was in doubt, and what was trained since then.
                rest = {name: value - sent.delta[name] for name, value in left.delta.items()}
            tokens = left.tokens - sent.tokens if rest is not None else 0
            trained = without(left.trained, sent.trained)
            self._left = replace(left, delta=rest, tokens=tokens, trained=trained)
        self._doubts = []

    # ------------------------------------------------------------------ average and commit

    def _average(self, membership: Membership, shares: Sequence[float]) -> Average:
        self._moving = "transfer"
        before = self._exchange.traffic.received
        delta = self._left.delta if shares[membership.index] else None
        round_ = self._state.progress.round
        average = self._all_ranks(
            lambda: self._averager.average(self._exchange, membership, shares, delta, round_)
        )
        self._usual_bytes = self._exchange.traffic.received - before
        self.on_phase("transferred")
        return average

    def _commit(
        self,
        membership: Membership,
        headers: Sequence[Header],
        tokens: Sequence[int],
        average: Average,
        leases: Leases,
    ) -> None:
        """All ranks of this cluster are ready: commit when all other clusters are, too."""
        progress = self._state.progress
        vote, why = Vote.YES, ""
        self._moving = "vote"
        doubt = _Doubt(self._left, progress.round, progress.rank, sum(map(bool, tokens)))
        try:
            gather(self._exchange, len(membership), _READY, _READY.numel())
        except ExchangeError as error:
            vote, why = Vote.UNSURE, f"not all were heard at the end: {error}"
        if len(membership) > 1 and tokens[membership.index]:
            self._doubts.append(doubt)
        self._require(vote, why)
        self.on_phase("commit")
        with self.lock:
            self._doubts = []
            self._averager.commit()
            with span("outer step"):
                self._state.optimizer.step(average.tensors, progress.steps)
            progress.round += 1
            progress.met = membership.number
            progress.tokens_total += sum(tokens)
            progress.contributors = {}
            for name, header, count in zip(membership.clusters, headers, tokens, strict=True):
                if count:
                    progress.contributors[name] = count
                    progress.counted[name] = (progress.round - 1, header.step)
            observed = _observed(membership.clusters, headers, tuple(progress.contributors))
            self._control.decide(progress, observed)
            progress.leases = leases.commit(
                {
                    name: Part(
                        progress.round_samples(header.step_samples), header.trained if count else ()
                    )
                    for name, header, count in zip(
                        membership.clusters, headers, tokens, strict=True
                    )
                }
            )
            self.rehash()


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
