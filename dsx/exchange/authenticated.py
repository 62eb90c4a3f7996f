"""Messages that only who holds the run secret can make, each for one place and one moment.

Whenever a round's members have met, they exchange fresh random numbers. From these and from the
run secret follows the key of the *session*, so that nothing that was said in another round, to
other members or by a former self can be said again. Each message gets a key of its own (from
session, sender, receiver and its number in the session) and a Poly1305 tag (RFC 8439) under it,
which with keys that are used once is unconditionally unforgeable, and five times as fast as a hash.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305

from dsx.errors import ExchangeError
from dsx.exchange.interface import Exchange, Membership, Traffic, Vote, gather
from dsx.exchange.secret import RunSecret

NONCE_BYTES = 16
TAG_BYTES = 16
_CHUNK = 2**20
"""Python's other threads get their turn between two chunks, after 0.4 ms."""
_TO_ALL, _TO_ONE = b"\0", b"\1"


class AuthenticatedExchange:
    """Another exchange, with a tag at the end of every message.

    An altered, repeated, reordered or foreign message raises ExchangeError with its sender's name.
    """

    def __init__(self, exchange: Exchange, secret: RunSecret) -> None:
        self._exchange = exchange
        self._secret = secret
        self._membership = Membership(("",), 0)
        self._session = b""
        self._number = 0
        self._room = torch.empty(0, dtype=torch.uint8)

    @property
    def traffic(self) -> Traffic:
        """With the tags: 17 bytes a message, besides 16 bytes to each member and round."""
        return self._exchange.traffic

    @property
    def limit_seconds(self) -> float:
        return self._exchange.limit_seconds

    @limit_seconds.setter
    def limit_seconds(self, seconds: float) -> None:
        self._exchange.limit_seconds = seconds

    @property
    def on_posted(self) -> Callable[[], None]:
        return self._exchange.on_posted

    @on_posted.setter
    def on_posted(self, call: Callable[[], None]) -> None:
        self._exchange.on_posted = call

    def join(self, seconds: float) -> Membership:
        self._membership = self._exchange.join(seconds)
        self._session = b""
        self._number = 0
        return self._membership

    def _greet(self) -> None:
        """The session's key. Not in `join`: that fails on all ranks of a cluster or on none."""
        names = self._membership.clusters
        nonce = _uint8(secrets.token_bytes(NONCE_BYTES))
        nonces = gather(self._exchange, len(names), nonce, most=NONCE_BYTES)
        met = hashlib.blake2b(digest_size=32)
        for name, sent in zip(names, nonces, strict=True):
            if sent.numel() != NONCE_BYTES:
                raise ExchangeError(
                    f"cluster {name} has no run secret, or speaks another version of dsx: its "
                    f"greeting has {sent.numel()} bytes, not {NONCE_BYTES}"
                )
            met.update(_field(name.encode()) + bytes(sent.numpy()))
        self._session = self._secret.key("session", met.digest())

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        names, own = self._membership.clusters, self._membership.index
        if len(names) == 1:
            return self._exchange.all_to_all(payloads, most)
        if not self._session:
            self._greet()
        self._number += 1
        received = self._exchange.all_to_all(self.seal(payloads), most + TAG_BYTES + 1)
        return [
            payloads[own] if member == own else self.open(message, names[member])
            for member, message in enumerate(received)
        ]

    def agree(self, vote: Vote, why: str = "") -> tuple[Vote, str]:
        return self._exchange.agree(vote, why)

    def reset(self) -> None:
        self._exchange.reset()

    def close(self) -> None:
        self._exchange.close()

    def seal(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The messages around payloads to each member, good until the next call."""
        sender, own = self._membership.name, self._membership.index
        if all(payload is payloads[0] for payload in payloads):
            # The same to all: one tag, and one copy of what may be many megabytes.
            room = self._take_room(payloads[0].numel() + TAG_BYTES + 1)
            self._put(payloads[0], _TO_ALL, sender, "", room)
            return [room] * len(payloads)
        sizes = [
            0 if member == own else payload.numel() + TAG_BYTES + 1
            for member, payload in enumerate(payloads)
        ]
        messages = list(self._take_room(sum(sizes)).split(sizes))
        for member, payload in enumerate(payloads):
            if member != own:
                name = self._membership.clusters[member]
                self._put(payload, _TO_ONE, sender, name, messages[member])
        return messages

    def _put(
        self, payload: torch.Tensor, kind: bytes, sender: str, to: str, message: torch.Tensor
    ) -> None:
        message[: payload.numel()].copy_(payload)
        message[payload.numel() :].copy_(_uint8(self._tag(payload, kind, sender, to) + kind))

    def _take_room(self, size: int) -> torch.Tensor:
        """Memory that is used again and again: to touch new memory takes longer than the tag."""
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room[:size]

    def open(self, message: torch.Tensor, sender: str) -> torch.Tensor:
        """The payload in a message, a view. Raises ExchangeError when it is not as it was sent."""
        payload, end = message[: -TAG_BYTES - 1], bytes(message[-TAG_BYTES - 1 :].numpy())
        tag, kind = end[:TAG_BYTES], end[TAG_BYTES:]
        to = "" if kind == _TO_ALL else self._membership.name
        if not hmac.compare_digest(tag, self._tag(payload, kind, sender, to)):
            raise ExchangeError(
                f"message {self._number} from cluster {sender} is refused: it was not made with "
                "this run's secret for this round and this place in it; somebody else is on the "
                "line, or the cluster has another --secret-file"
            )
        return payload

    def _tag(self, payload: torch.Tensor, kind: bytes, sender: str, to: str) -> bytes:
        """Of one message; `number` and the session make its key one that is used once."""
        place = kind + _field(sender.encode()) + _field(to.encode())
        place += self._number.to_bytes(8, "little")
        once = hashlib.blake2b(place, key=self._session, digest_size=32).digest()
        tag = Poly1305(once)
        view = memoryview(payload.contiguous().numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            tag.update(view[start : start + _CHUNK])
        return tag.finalize()


def _field(data: bytes) -> bytes:
    """With its length in front, so that two fields can't be cut in another place."""
    return len(data).to_bytes(4, "little") + data


def _uint8(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
