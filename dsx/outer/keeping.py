"""Copies an outer engine's state at one moment, and brings it back."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch

from dsx.outer.agreement import Agreement
from dsx.outer.averaging import Averager
from dsx.outer.control import Control
from dsx.outer.digest import join_digests
from dsx.outer.overlap import Delay, DelayClock
from dsx.outer.own_state import Flight, OwnState
from dsx.outer.reporting import RoundReporter
from dsx.outer.round import Contribution, Outcome, RoundExchange
from dsx.outer.snapshot import (
    EngineRecord,
    FlightRecord,
    OutcomeRecord,
    Snapshot,
    WantsShared,
    part,
)
from dsx.outer.state import SharedState

Tensors = dict[str, torch.Tensor]


class Keeper:
    """One rank's part of it. All methods are collective over the cluster."""

    def __init__(
        self,
        delay: Delay,
        state: SharedState,
        round_: RoundExchange,
        averager: Averager,
        control: Control,
        agreement: Agreement,
        reporter: RoundReporter,
    ) -> None:
        self._delay = delay
        self._state = state
        self._round = round_
        self._averager = averager
        self._control = control
        self._agreement = agreement
        self._reporter = reporter
        self._to_send: Tensors | None = None
        """The pseudo-gradient that was on the wire when the state was saved."""

    # ------------------------------------------------------------------ copying

    def copy(self, own: OwnState, wants_shared: WantsShared) -> Snapshot:
        """The state at this moment.

        An exchange in the air goes on: it is in the snapshot as one that is still to be made, or,
        when its average is in theta already, as one that is over.
        """
        with self._round.lock:
            if not self._moved_anywhere(own):
                return self._copy(own, None, wants_shared)
        # The ranks commit together: those that have not will have in a moment.
        assert own.flight is not None
        return self._copy(own, own.flight.future.result(), wants_shared)

    def shared_digest(self) -> str:
        """Of theta and outer momentum, of the whole model."""
        theta, momentum = self._round.theta_digest, self._round.momentum_digest
        sums = self._agreement.total([*theta, *momentum])
        return join_digests(sums[: len(theta)]) + join_digests(sums[len(theta) :])

    def _moved_anywhere(self, own: OwnState) -> bool:
        """Whether some rank's theta holds the average of the exchange in the air already."""
        flight, round_ = own.flight, self._state.progress.round
        moved = flight is not None and round_ != flight.record.base_round
        return self._agreement.maximum([float(moved)])[0] > 0

    def _copy(self, own: OwnState, outcome: Outcome | None, wants_shared: WantsShared) -> Snapshot:
        digest = self.shared_digest()
        sent, received, *more = self._agreement.total(
            [
                *self._reporter.traffic(),
                *(outcome.moments.values() if outcome is not None else ()),
                *(outcome.measured if outcome is not None else ()),
            ]
        )
        shared = None
        if wants_shared(self._state.progress.round, digest):
            shared = {name: value.clone() for name, value in self._state.tensors().items()}
        flight = None
        tensors = self._averager.state_dict()
        if own.flight is not None:
            over = None
            if outcome is not None:
                count = len(outcome.moments.values())
                over = OutcomeRecord.of(outcome, more[:count], more[count:])
            flight = own.flight.saved(over)
            tensors |= own.flight.tensors(outcome.unsent if outcome is not None else None)
        return Snapshot(
            progress=self._state.progress.model_copy(deep=True),
            digest=digest,
            shared=shared,
            record=EngineRecord(
                steps=own.steps.model_copy(),
                tokens=own.tokens,
                trained=own.trained,
                todo=own.todo,
                seconds=own.seconds,
                share=own.share,
                measured_rank=own.measured_rank,
                last_exchange_seconds=own.last_exchange_seconds,
                rounds_left_out=own.rounds_left_out,
                delays=own.delays.state_dict(),
                bytes_sent=int(sent),
                bytes_received=int(received),
                flight=flight,
            ),
            own=tensors,
        )

    # ------------------------------------------------------------------ bringing back

    def restore(self, snapshot: Snapshot, base: Callable[[], Tensors]) -> OwnState | None:
        """Take over what is shared.

        Args:
            base: gives what a cluster trains on when nothing is in the air.

        Returns:
            the cluster's own state; None when the snapshot has none.
        """
        assert snapshot.shared is not None
        self._state.load(snapshot.shared, snapshot.progress)
        self._round.rehash()
        record = snapshot.record
        if record is None:
            return None
        averager = {k: v for k, v in snapshot.own.items() if not k.startswith("flight_")}
        self._averager.load_state_dict(averager)
        self._reporter.restore(record.bytes_sent, record.bytes_received)
        own = OwnState(
            delays=DelayClock(self._delay),
            steps=record.steps.model_copy(),
            tokens=record.tokens,
            trained=record.trained,
            todo=record.todo,
            seconds=record.seconds,
            share=record.share,
            measured_rank=record.measured_rank,
            last_exchange_seconds=record.last_exchange_seconds,
            rounds_left_out=record.rounds_left_out,
        )
        own.delays.load_state_dict(record.delays)
        if record.flight is not None:
            own.flight = self._flight(record.flight, snapshot.own, base)
        return own

    def _flight(
        self,
        record: FlightRecord,
        tensors: Mapping[str, torch.Tensor],
        base: Callable[[], Tensors],
    ) -> Flight:
        start = part(tensors, "flight_start")
        flight = Flight(
            future=Future(),
            start=start,
            end=part(tensors, "flight_end") or start,
            record=record.model_copy(update={"outcome": None}),
        )
        if record.outcome is not None:
            unsent = part(tensors, "flight_unsent")
            flight.future.set_result(self._seen(record.outcome, self._agreement.is_first, unsent))
        elif record.sound:
            # Now, while theta is the one that the delta was taken from.
            trained_on = base()
            self._to_send = {name: trained_on[name] - value for name, value in flight.end.items()}
        return flight

    def goes_on(
        self,
        own: OwnState,
        restored: tuple[int, int],
        outcome: Outcome,
        send: "Callable[[Contribution], Future[Outcome]]",
    ) -> bool:
        """Whether a restored state goes on from the shared one that the clusters agreed on.

        If so, an exchange that was not over is made again; or, when the others had come to its end
        with this cluster's part in it, is over.

        Args:
            restored: version of the shared state that belongs to `own`.
            outcome: of the meeting.
            send: makes an exchange.
        """
        flight = own.flight
        if outcome.diverged:
            return False
        if flight is None or flight.future.done():
            return self._state.progress.version == restored
        delta, self._to_send = self._to_send, None
        if self._state.progress.version == restored:
            flight.future = send(flight.contribution(delta))
            return True
        progress = self._state.progress
        sent = flight.record
        counted = progress.counted.get(outcome.cluster) == (sent.base_round, sent.step)
        if delta is None or progress.round != sent.base_round + 1 or not counted:
            return False
        if self._control.changes_rank:
            self._averager.set_rank(sent.rank)
        self._averager.catch_up(delta, sent.base_round, len(progress.contributors))
        seen = OutcomeRecord.unseen(progress.contributors, outcome.cluster)
        flight.future.set_result(self._seen(seen, False, {}))
        return True

    def _seen(
        self, record: OutcomeRecord, with_moments: bool, unsent: Mapping[str, torch.Tensor]
    ) -> Outcome:
        measures = self._control.rank_rule.length
        return record.outcome(self._round.theta_digest, with_moments, measures, unsent)
