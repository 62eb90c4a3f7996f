"""Where a cluster was at each of its lines: steps, tokens, bytes and time so far."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dsx.tracking.events import Event, InnerEvent, OuterEvent, RunEvent


@dataclass(frozen=True)
class Place:
    """What lies behind a cluster."""

    step: int = 0
    tokens: int = 0
    bytes: int = 0
    """Sent to other clusters, repeated rounds included."""
    seconds: float = 0.0
    """Since its first start, without the gaps between one process and the next."""


def places(events: Sequence[Event]) -> Iterator[tuple[Event, Place]]:
    """One cluster's lines in their order, each with where the cluster was then."""
    place = Place()
    before: Event | None = None
    for event in events:
        if before is not None and not isinstance(event, RunEvent):
            place = replace(place, seconds=place.seconds + max(0.0, event.time - before.time))
        if isinstance(event, InnerEvent):
            place = replace(place, step=event.step, tokens=event.tokens)
        elif isinstance(event, OuterEvent):
            place = replace(place, bytes=place.bytes + event.bytes_sent)
        before = event
        yield event, place


def busy_shares(events: Sequence[Event], steps: int = 20) -> list[tuple[int, float]]:
    """(inner step, share of the time spent in inner steps), over stretches of `steps` of them or
    a round each, whatever is longer; a run that is shorter is one stretch. Without the first step
    of a start, whose beginning nobody wrote down."""
    shares: list[tuple[int, float]] = []
    began: float | None = None
    busy, made, tokens, step = 0.0, 0, 0, 0
    has_rounds = any(isinstance(event, OuterEvent) for event in events)
    for event in events:
        if isinstance(event, RunEvent):
            began = None
        if isinstance(event, InnerEvent):
            trained, tokens = event.tokens - tokens, event.tokens
            if began is None:
                began, busy, made = event.time, 0.0, 0
                continue
            made += 1
            step = event.step
            if event.tokens_per_second > 0:
                busy += max(0, trained) / event.tokens_per_second
        ends = isinstance(event, OuterEvent if has_rounds else InnerEvent)
        if ends and began is not None and made >= steps and event.time > began:
            shares.append((step, min(1.0, busy / (event.time - began))))
            began, busy, made = event.time, 0.0, 0
    if not shares and began is not None and made and events[-1].time > began:
        shares.append((step, min(1.0, busy / (events[-1].time - began))))
    return shares
