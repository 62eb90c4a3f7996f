"""Who takes part in a round: one rank of each cluster asks the coordinator, and beats its heart.

torchft's manager server isn't used: it would open one more port to strangers, answer no request
while the coordinator is away, and go on beating when another rank of its cluster has stopped.
"""

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

# torchft reads this once, when it is imported; at its own default it tells several lines a round.
os.environ.setdefault("RUST_LOG", "warn")

from torchft.coordination import LighthouseClient

from dsx.errors import ExchangeError

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Between two beats. The control traffic shares the slow link with the exchange: at torchft's
default of ten a second it would take several per cent of a 0.5 Mbit/s link."""
SILENCE_SECONDS = 5.0
"""After so long without a beat, a rank or a cluster counts as gone."""
_LOOK_SECONDS = 0.2
_BEAT_KEY = "dsx/beat"


@dataclass(frozen=True)
class Meeting:
    """What the coordinator told all clusters of a round alike."""

    replicas: tuple[str, ...]
    """Members, `CLUSTER:LAUNCH`, in the order in which everybody sums."""
    stores: tuple[str, ...]
    """HOST:PORT of each member's store."""
    connection: str
    """Names the connections among exactly these members that the round is to use."""
    number: int
    """Nanoseconds of the coordinator's clock: later meetings have greater numbers."""


class Pulse:
    """Beats for one rank, so that rank 0 knows that it is neither stopped nor gone.

    Args:
        open_store: opens a connection of its own to the store that the cluster's ranks share; one
            that waits for a key can't be used from another thread.
        beat: called with the longest silence of a rank, in seconds; only on rank 0.
    """

    def __init__(
        self,
        open_store: Callable[[], TCPStore],
        rank: int,
        world_size: int,
        beat: Callable[[float], None] | None,
    ) -> None:
        self._store = open_store() if world_size > 1 else None
        self._rank = rank
        self._others = range(1, world_size) if beat is not None else range(0)
        self._beat = beat
        self._heard: dict[int, tuple[int, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outer-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            try:
                if self._beat is not None:
                    self._beat(self._silence())
                elif self._store is not None:
                    self._store.add(f"{_BEAT_KEY}/{self._rank}", 1)
            except Exception as error:
                # The cluster's own store is gone, and with it rank 0: this launch ends.
                log.debug("no beat: %s", error)

    def _silence(self) -> float:
        now = time.monotonic()
        for rank in self._others:
            assert self._store is not None
            count = self._store.add(f"{_BEAT_KEY}/{rank}", 0)
            if count != self._heard.get(rank, (-1, 0.0))[0]:
                self._heard[rank] = (count, now)
        return max((now - at for _, at in self._heard.values()), default=0.0)


class QuorumClient:
    """Rank 0's line to the coordinator.

    Args:
        cluster: name of this cluster.
        store: HOST:PORT of the store at which other clusters connect to this one.
        coordinator: its URL.
        connect_seconds: longest wait for it.

    Raises:
        ExchangeError: the coordinator can't be reached.
    """

    def __init__(self, cluster: str, store: str, coordinator: str, connect_seconds: float) -> None:
        # A restarted cluster is told from its former self by the suffix.
        self.replica = f"{cluster}:{uuid.uuid4()}"
        self._store = store
        self._coordinator = coordinator
        connect = timedelta(seconds=connect_seconds)
        try:
            self._heart = LighthouseClient(coordinator, connect_timeout=connect)
            self._heart.heartbeat(self.replica, connect)
        except Exception as error:
            raise ExchangeError(
                f"the coordinator at {coordinator} can't be reached: {error}; start one with "
                "`dsx coordinator --bind HOST:PORT` and give its address to --coordinator"
            ) from error
        self._reached = time.monotonic()
        self._away = False

    def beat(self, silence: float) -> None:
        """Tell the coordinator that this cluster is there, unless a rank of it has stopped."""
        if silence > SILENCE_SECONDS:
            # Nothing is known of the coordinator either; the other clusters go on without us.
            self._reached = time.monotonic()
            return
        try:
            self._heart.heartbeat(self.replica, timedelta(seconds=SILENCE_SECONDS))
        except Exception as error:
            if not self._away:
                log.warning("the coordinator at %s does not answer: %s", self._coordinator, error)
            self._away = True
            return
        self._reached = time.monotonic()
        if self._away:
            log.warning("the coordinator at %s answers again", self._coordinator)
        self._away = False

    def ask(self, connection: str, seconds: float) -> Meeting:
        """Wait for the other clusters that are there.

        Args:
            connection: what this cluster is connected by; empty after a failed round.

        Raises:
            ExchangeError: no answer within `seconds`, or the coordinator can't be reached.
        """
        if self._away:
            raise ExchangeError(f"the coordinator at {self._coordinator} does not answer")
        answer: list[Any] = []
        done = threading.Event()

        def request() -> None:
            try:
                limit = timedelta(seconds=SILENCE_SECONDS)
                client = LighthouseClient(self._coordinator, connect_timeout=limit)
                answer.append(
                    client.quorum(
                        self.replica,
                        timeout=timedelta(seconds=seconds),
                        store_address=self._store,
                        data={"connection": connection},
                    )
                )
            except Exception as error:
                answer.append(error)
            done.set()

        # A request over a link that was cut is answered by nobody, not even by an error.
        threading.Thread(target=request, name="outer-quorum", daemon=True).start()
        began = time.monotonic()
        while not done.wait(_LOOK_SECONDS):
            silent = time.monotonic() - max(self._reached, began)
            if silent > 2 * SILENCE_SECONDS:
                raise ExchangeError(
                    f"the coordinator at {self._coordinator} has not answered for {silent:.0f} s"
                )
        (found,) = answer
        if isinstance(found, Exception):
            raise ExchangeError(f"no quorum of clusters was reached: {found}")
        return _meeting(found)


def _meeting(quorum: Any) -> Meeting:
    members = sorted(quorum.participants, key=lambda member: member.replica_id)
    replicas = tuple(member.replica_id for member in members)
    number = quorum.created.seconds * 10**9 + quorum.created.nanos
    digest = hashlib.blake2b(json.dumps(replicas).encode(), digest_size=8).hexdigest()
    # All see the same answers, and so decide alike: one that is not connected, or not to these,
    # makes everybody connect anew.
    known = {_connection(member.data) for member in members}
    connection = known.pop() if len(known) == 1 else ""
    if not connection.startswith(f"{digest}-"):
        connection = f"{digest}-{number}"
    return Meeting(replicas, tuple(m.store_address for m in members), connection, number)


def _connection(data: Any) -> str:
    told = data.get("connection") if isinstance(data, dict) else None
    return told if isinstance(told, str) else ""
