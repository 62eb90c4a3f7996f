"""Nobody without the run secret changes, repeats, reorders or redirects a message unseen."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.errors import ExchangeError
from dsx.exchange.authenticated import TAG_BYTES, AuthenticatedExchange
from dsx.exchange.in_process import InProcessExchange, InProcessHub
from dsx.exchange.interface import Membership, gather
from dsx.exchange.secret import RunSecret

SECRET, OTHER = RunSecret(b"s" * 32), RunSecret(b"o" * 32)
SEAL = TAG_BYTES + 1
Forge = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Line:
    """What lies between a cluster and the others: it sees all that comes in, and may change it."""

    def __init__(self, exchange: InProcessExchange) -> None:
        self.exchange = exchange
        self.seen: list[list[torch.Tensor]] = []
        self.forge: Forge = lambda messages: messages

    @property
    def traffic(self):
        return self.exchange.traffic

    def join(self, seconds: float) -> Membership:
        return self.exchange.join(seconds)

    def all_to_all(self, payloads: list[torch.Tensor], most: int) -> list[torch.Tensor]:
        messages = self.exchange.all_to_all(payloads, most)
        self.seen.append([message.clone() for message in messages])
        return self.forge([message.clone() for message in messages])

    def close(self) -> None:
        self.exchange.close()


class Clusters:
    """Some clusters that hold a secret each, and the lines over which they hear of each other."""

    def __init__(self, secrets: dict[str, RunSecret]) -> None:
        self.hub = InProcessHub(secrets, timeout_seconds=10)
        self.lines = {name: Line(self.hub.exchange(name)) for name in secrets}
        self.ends = {
            name: AuthenticatedExchange(self.lines[name], secret)
            for name, secret in secrets.items()
        }

    def together(self, what: Callable[[AuthenticatedExchange], object]) -> dict[str, object]:
        def run(name: str) -> object:
            try:
                return what(self.ends[name])
            except ExchangeError as error:
                return error

        with ThreadPoolExecutor(len(self.ends)) as pool:
            return dict(zip(self.ends, pool.map(run, self.ends), strict=True))

    def join(self) -> None:
        for outcome in self.together(arrive).values():
            assert isinstance(outcome, Membership), outcome

    def gather(self, texts: dict[str, bytes]) -> dict[str, object]:
        return self.together(lambda end: [*map(raw, gather(end, len(texts), say(end, texts), 99))])


def arrive(end: AuthenticatedExchange) -> Membership:
    """Join, and agree on the session, as the first message would."""
    members = end.join(10)
    end._greet()
    return members


def say(end: AuthenticatedExchange, texts: dict[str, bytes]) -> torch.Tensor:
    return uint8(texts[end._membership.name])


def uint8(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def raw(payload: torch.Tensor) -> bytes:
    return bytes(payload.numpy())


def three(secret_of_c: RunSecret = SECRET) -> Clusters:
    clusters = Clusters({"a": SECRET, "b": SECRET, "c": secret_of_c})
    clusters.join()
    return clusters


TEXTS = {"a": b"from a", "b": b"", "c": b"from c, longer"}


def refused(outcome: object, sender: str) -> bool:
    return isinstance(outcome, ExchangeError) and f"from cluster {sender} is refused" in str(
        outcome
    )


def test_honest_messages_arrive_as_they_were_sent_round_after_round() -> None:
    clusters = three()
    for _ in range(2):
        for _ in range(3):
            assert set(map(str, clusters.gather(TEXTS).values())) == {str([*TEXTS.values()])}
        got = clusters.together(
            lambda end: [
                *map(raw, end.all_to_all([say(end, TEXTS), uint8(b"for b"), uint8(b"")], 99))
            ]
        )
        assert got["b"] == [b"for b", b"for b", b"for b"]
        assert got["c"] == [b"", b"", b""]
        clusters.join()


def test_the_bytes_on_the_way_are_counted_tags_and_greetings_included() -> None:
    clusters = three()
    clusters.gather(TEXTS)
    assert clusters.ends["a"].traffic.sent == 2 * (16 + len(TEXTS["a"]) + SEAL)
    assert clusters.ends["a"].traffic.received == 2 * (16 + SEAL) + len(TEXTS["c"])


@settings(max_examples=60)
@given(st.data())
def test_one_flipped_bit_is_refused_with_the_senders_name_and_others_hear_on(data) -> None:
    clusters = three()
    place = data.draw(st.integers(0, 8 * (len(TEXTS["c"]) + SEAL) - 1))

    def flip(messages: list[torch.Tensor]) -> list[torch.Tensor]:
        messages[2][place // 8] ^= 1 << place % 8
        return messages

    clusters.lines["a"].forge = flip
    got = clusters.gather(TEXTS)
    assert refused(got["a"], "c")
    assert got["b"] == got["c"] == [*TEXTS.values()]


@settings(max_examples=30)
@given(st.integers(0, len(TEXTS["c"]) + SEAL), st.binary(max_size=40))
def test_a_message_that_is_cut_or_made_up_is_refused(length: int, made_up: bytes) -> None:
    for forged in (lambda m: m[: min(length, m.numel() - 1)], lambda m: uint8(made_up)):
        clusters = three()
        clusters.lines["a"].forge = lambda messages, f=forged: [*messages[:2], f(messages[2])]
        assert refused(clusters.gather(TEXTS)["a"], "c")


def replays(lines: dict[str, Line]) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
    """What b may say to a instead of the third message of its second round."""
    a, b, c = (lines[name].seen for name in "abc")
    yield "the same message of an earlier round", a[2][1:2]
    yield "an earlier message of this round", a[4][1:2]
    yield "what b has said to c alone", c[-1][1:2]
    yield "what c has just said to a", a[-1][2:3]
    yield "what a itself has just said to b", b[-1][0:1]


@pytest.mark.parametrize("index", range(5))
def test_replayed_reordered_and_redirected_messages_are_refused(index: int) -> None:
    clusters = three()

    def to_each(end: AuthenticatedExchange) -> list[bytes]:
        names = end._membership.clusters
        texts = [uint8(f"{end._membership.name} to {name}".encode()) for name in names]
        return [*map(raw, end.all_to_all(texts, 99))]

    clusters.gather(TEXTS)
    clusters.together(to_each)
    clusters.join()
    clusters.gather(TEXTS)

    def replay(messages: list[torch.Tensor]) -> list[torch.Tensor]:
        # The others' lines have seen this message, too, by the time that all have sent theirs.
        what, (message,) = [*replays(clusters.lines)][index]
        assert not torch.equal(message, messages[1]), what
        return [messages[0], message, messages[2]]

    barrier_passed = clusters.together(to_each)
    assert barrier_passed["a"] == [b"a to a", b"b to a", b"c to a"]
    clusters.lines["a"].forge = replay
    got = clusters.together(to_each)
    assert refused(got["a"], "b"), got
    assert got["b"] == [b"a to b", b"b to b", b"c to b"]


def test_two_messages_in_the_wrong_order_are_both_refused() -> None:
    clusters = three()
    held: list[torch.Tensor] = []

    def hold_back(messages: list[torch.Tensor]) -> list[torch.Tensor]:
        held.append(messages[1])
        return [messages[0], held[0] if len(held) > 1 else messages[2], messages[2]]

    clusters.lines["a"].forge = hold_back
    assert refused(clusters.gather(TEXTS)["a"], "b")
    assert refused(clusters.gather(TEXTS)["a"], "b")


def test_a_cluster_with_another_secret_is_refused_by_name_by_all_and_refuses_them() -> None:
    got = three(OTHER).gather(TEXTS)
    assert refused(got["a"], "c")
    assert refused(got["b"], "c")
    assert refused(got["c"], "a")


def test_a_cluster_without_a_secret_is_refused_by_name() -> None:
    clusters = Clusters({"a": SECRET, "b": SECRET})
    stranger = clusters.hub.exchange("stranger")

    def come() -> None:
        members = stranger.join(10)
        gather(stranger, len(members), uint8(b"{}"), 4096)

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come)
        for outcome in clusters.together(arrive).values():
            assert "cluster stranger has no run secret" in str(outcome)
        coming.result()


def test_an_altered_greeting_ends_in_a_refusal_and_not_in_a_common_key() -> None:
    clusters = Clusters({"a": SECRET, "b": SECRET})
    clusters.lines["a"].forge = lambda messages: [messages[0], messages[1] ^ 1]
    clusters.join()
    clusters.lines["a"].forge = lambda messages: messages
    got = clusters.gather({"a": b"x", "b": b"y"})
    assert refused(got["a"], "b")
    assert refused(got["b"], "a")


def test_a_message_longer_than_can_be_due_is_refused_by_name() -> None:
    got = three().together(lambda end: gather(end, 3, uint8(b"four"), most=3))
    assert all("cluster" in str(e) and "at most" in str(e) for e in got.values())
