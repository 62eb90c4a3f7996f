"""Clusters as threads of one process: what simulation and unit tests exchange over."""

import threading
from collections.abc import Callable, Iterable

import torch

from dsx.errors import ExchangeError
from dsx.exchange.interface import Membership, Traffic, Vote, check_length


class InProcessHub:
    """Where the exchanges of one process meet.

    A cluster is a member from `exchange(name)` until its `close()`. A `join` completes when every
    member has called it, so that whoever registers later enters with the next round.
    """

    def __init__(self, names: Iterable[str] = (), timeout_seconds: float = 600.0) -> None:
        self._changed = threading.Condition()
        self.timeout_seconds = timeout_seconds
        self._waiting: set[str] = set()
        self._clusters: tuple[str, ...] = ()
        self._generation = 0
        self._mail: dict[tuple[int, int, str, str], torch.Tensor] = {}
        self._members: set[str] = set()
        self._abandoned: set[tuple[str, int]] = set()
        self._exchanges: dict[str, InProcessExchange] = {}
        for name in names:
            self.exchange(name)

    def exchange(self, name: str) -> "InProcessExchange":
        """The exchange of cluster `name`, registered on first use."""
        with self._changed:
            if name not in self._members:
                self._members.add(name)
                self._exchanges[name] = InProcessExchange(self, name)
            return self._exchanges[name]

    def _leave(self, name: str) -> None:
        with self._changed:
            self._members.discard(name)
            self._waiting.discard(name)
            self._complete_join()
            self._changed.notify_all()

    def _complete_join(self) -> None:
        if self._waiting and self._waiting == self._members:
            self._clusters = tuple(sorted(self._members))
            self._waiting = set()
            self._generation += 1
            self._changed.notify_all()

    def _join(self, name: str) -> tuple[int, Membership]:
        with self._changed:
            generation = self._generation
            self._waiting.add(name)
            self._complete_join()
            self._wait(lambda: self._generation > generation, f"join of {name}")
            place = self._clusters.index(name)
            return self._generation, Membership(self._clusters, place, self._generation)

    def _abandon(self, name: str, generation: int) -> None:
        with self._changed:
            self._abandoned.add((name, generation))
            self._changed.notify_all()

    def _post(self, key: tuple[int, int, str, str], payload: torch.Tensor) -> None:
        with self._changed:
            self._mail[key] = payload
            self._changed.notify_all()

    def _take(self, key: tuple[int, int, str, str]) -> torch.Tensor:
        generation, _, source, _ = key

        def is_gone() -> bool:
            return source not in self._members or (source, generation) in self._abandoned

        with self._changed:
            self._wait(lambda: key in self._mail or is_gone(), f"payload {key[1]} from {source}")
            if key not in self._mail:
                raise ExchangeError(f"cluster {source} left in the middle of a round")
            return self._mail.pop(key)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(ready, timeout=self.timeout_seconds):
            raise ExchangeError(
                f"{what} did not come within {self.timeout_seconds:g} s "
                f"(members: {', '.join(sorted(self._members))})"
            )


class InProcessExchange:
    """One cluster's end of an `InProcessHub`."""

    def __init__(self, hub: InProcessHub, name: str) -> None:
        self.traffic = Traffic()
        self.limit_seconds = hub.timeout_seconds
        self.on_posted: Callable[[], None] = lambda: None
        self._hub = hub
        self._name = name
        self._membership = Membership((name,), 0)
        self._generation = 0
        self._sequence = 0

    def join(self, seconds: float) -> Membership:
        self._generation, self._membership = self._hub._join(self._name)
        self._sequence = 0
        return self._membership

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        clusters = self._membership.clusters
        self._sequence += 1
        for name, payload in zip(clusters, payloads, strict=True):
            # A copy, as a socket would make: the sender may go on writing to its buffer.
            self._hub._post(self._key(self._name, name), payload.clone())
        self.on_posted()
        received = [self._hub._take(self._key(name, self._name)) for name in clusters]
        for index, (sent, got) in enumerate(zip(payloads, received, strict=True)):
            if index != self._membership.index:
                check_length(clusters[index], got.numel(), most)
                self.traffic.sent += sent.numel()
                self.traffic.received += got.numel()
        return received

    def agree(self, vote: Vote, why: str = "") -> tuple[Vote, str]:
        return vote, why

    def reset(self) -> None:
        self._hub._abandon(self._name, self._generation)

    def close(self) -> None:
        self._hub._leave(self._name)

    def _key(self, source: str, target: str) -> tuple[int, int, str, str]:
        return self._generation, self._sequence, source, target
