"""What a run says about itself: five kinds of lines, one JSON object each.

A line has `kind`, `cluster` and `time` (Unix seconds) and the keys of its kind. Fields may join a
kind later, so a reader skips keys and kinds that it doesn't know. A number that is not finite is
written as `null` (JSON has no NaN) and read back as NaN.

A resumed run goes on in the same file. Inner steps that it repeats are written again, and the
later line is the one that counts (`latest_by_step`).
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from dsx.errors import TrackingError
from dsx.settings.problems import EXPECTED, show

METRICS_PATTERN = "metrics-*.jsonl"


Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""JSON has no NaN."""


def metrics_path(run_dir: Path | str, cluster: str) -> Path:
    """Where the lines of `cluster` are kept."""
    return Path(run_dir) / f"metrics-{cluster}.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Written once at every start of a cluster, before its first step."""

    kind: ClassVar[str] = "run"
    cluster: str
    time: float = field(default_factory=time.time)
    settings: dict[str, Any]
    """The whole settings file with its overrides, as JSON."""
    versions: dict[str, str]
    """Package name to version."""
    model_size: int
    """Parameters of the whole model, tied ones once."""
    layout: dict[str, Any]
    """`stages`, `replicas` and whatever else says how the cluster is laid out."""
    heldout_bytes_per_token: float | None = None
    """Bytes of held-out text per held-out token; turns a loss into bits per byte."""


@dataclass(frozen=True, kw_only=True)
class InnerEvent:
    """One inner step, an optimizer step over all micro-batches of the cluster."""

    kind: ClassVar[str] = "inner"
    cluster: str
    time: float = field(default_factory=time.time)
    step: int
    """Inner steps of the run that lie behind the cluster, this one included (the fastest cluster's,
    where a slower one makes fewer in a round)."""
    round: int
    """Rounds committed when the step was made, from 0."""
    loss: Number
    """Mean training loss of the step's tokens, nats per token."""
    lr: Number
    grad_norm: Number
    """Norm of the whole model's gradient before clipping; NaN where it was not measured."""
    tokens: int
    """Tokens that this cluster has trained on since the start of the run."""
    tokens_per_second: Number
    """This cluster's tokens of the step over its wall-clock seconds."""


@dataclass(frozen=True, kw_only=True)
class OuterEvent:
    """One committed round, as this cluster saw it."""

    kind: ClassVar[str] = "outer"
    cluster: str
    time: float = field(default_factory=time.time)
    round: int
    """Rounds committed, this one included: the first line has 1."""
    participants: list[str]
    """Clusters whose pseudo-gradients were averaged, in the order of summation."""
    bytes_sent: int
    """Bytes that all ranks of this cluster sent to other clusters for this round."""
    bytes_received: int
    exchange_seconds: Number
    """From the first byte to the average, overlapped with inner steps or not."""
    blocked_seconds: Number
    """How long inner steps stood still for this round's exchange and outer step."""
    local_steps: int
    """Inner steps that this cluster made in the round (H, or fewer where it is slower)."""
    codec: str
    pseudo_gradient_norm: Number
    shared_digest: str
    """Digest of the shared weights after the outer step: equal on all participants."""
    tokens_total: int
    """Tokens that all clusters together have trained on since the start of the run."""
    rank: int = 0
    """Of the low-rank codec of matrices; 0: another codec."""
    delay: int = 0
    """Inner steps between the boundary and the arrival of the average."""
    relative_error: Number = math.nan
    """||v - decode(encode(v))|| / ||v||: what the codec lost."""
    residual_ratio: Number = math.nan
    """Norm of the error feedback over that of the averaged pseudo-gradient."""
    cosine: Number = math.nan
    """Between this cluster's pseudo-gradient and the average."""


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """A held-out evaluation."""

    kind: ClassVar[str] = "eval"
    cluster: str
    time: float = field(default_factory=time.time)
    step: int
    """Inner steps finished."""
    round: int
    """Rounds committed."""
    loss: Number
    """Mean held-out loss, nats per token."""
    weights: Literal["shared", "local"]


@dataclass(frozen=True, kw_only=True)
class PhasesEvent:
    """What one rank did in one round, and when; of a few rounds only."""

    kind: ClassVar[str] = "phases"
    cluster: str
    time: float = field(default_factory=time.time)
    round: int
    """The round whose average had arrived at the end."""
    rank: int
    """In its cluster."""
    spans: list[tuple[str, float, float]]
    """Phase, its start (Unix seconds), its seconds; by start. Phases overlap: an exchange has a
    thread of its own, and so has the writing of a checkpoint."""

    def __post_init__(self) -> None:
        # JSON knows lists only.
        spans = [(name, start, seconds) for name, start, seconds in self.spans]
        object.__setattr__(self, "spans", spans)


Event = Union[RunEvent, InnerEvent, OuterEvent, EvalEvent, PhasesEvent]  # noqa: UP007 - used at run time

KINDS: dict[str, type[Event]] = {
    cls.kind: cls for cls in (RunEvent, InnerEvent, OuterEvent, EvalEvent, PhasesEvent)
}


_READ: dict[str, TypeAdapter[Event]] = {kind: TypeAdapter(cls) for kind, cls in KINDS.items()}
_WAY_OUT = "remove or repair it"


def to_line(event: Event) -> str:
    """The event as one line of JSON, newline included.

    Raises `TrackingError` when a value can't be written as JSON.
    """
    record = {"kind": event.kind, **dataclasses.asdict(event)}
    try:
        return json.dumps(_finite(record), allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise TrackingError(
            f"a {event.kind!r} line of cluster {event.cluster!r} can't be written as JSON "
            f"({error}); pass plain numbers, strings, lists and dicts"
        ) from error


def parse_line(line: str, where: str) -> Event | None:
    """The event on a line; None for a kind that this version doesn't know.

    Raises `TrackingError`, naming `where` and what is wrong there, when it is no event.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TrackingError(f"{where} is not JSON ({error}); {_WAY_OUT}") from error
    if not isinstance(record, dict):
        raise TrackingError(f"{where} is {show(record)}, not a JSON object; {_WAY_OUT}")
    kind = record.get("kind")
    if not isinstance(kind, str):
        said = f"its 'kind' is {show(kind)}" if "kind" in record else "it has no 'kind'"
        raise TrackingError(
            f"{where} is no line of a run: {said}; expected one of {', '.join(KINDS)}; {_WAY_OUT}"
        )
    if kind not in KINDS:
        return None
    try:
        return _READ[kind].validate_json(line, strict=True)
    except ValidationError as error:
        first = _explain(error.errors(include_url=False)[0])
        raise TrackingError(f"{where}: a line of kind {kind!r} {first}; {_WAY_OUT}") from error


def _explain(item: ErrorDetails) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"has no {key!r}"
    expected = item.get("ctx", {}).get("expected") or EXPECTED.get(item["type"]) or item["msg"]
    return f"has {show(item['input'])} as {key!r}, expected {expected}"


def read_file(path: Path) -> list[Event]:
    """The events of one metrics file, in the order in which they were written.

    A last line without its newline is one that a killed process did not finish; it is left out.
    Raises `TrackingError` for any other line that isn't an event, with its number.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    events = (
        parse_line(line, f"{path}, line {number}")
        for number, line in enumerate(lines[:-1], start=1)
        if line.strip()
    )
    return [event for event in events if event is not None]


def read_events(run_dir: Path | str) -> list[Event]:
    """All events of a run, cluster by cluster (by name), each in the order of writing.

    Raises `TrackingError` when the folder holds no metrics file, or one with a damaged line.
    """
    paths = sorted(Path(run_dir).glob(METRICS_PATTERN))
    if not paths:
        raise TrackingError(
            f"{run_dir} holds no {METRICS_PATTERN}; give the `run_dir` of a run that has started"
        )
    return [event for path in paths for event in read_file(path)]


Kind = TypeVar("Kind", RunEvent, InnerEvent, OuterEvent, EvalEvent, PhasesEvent)


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """The events of one kind, in their order."""
    return [event for event in events if isinstance(event, kind)]


def latest_by_step(events: Iterable[Event]) -> list[InnerEvent]:
    """One cluster's inner steps in order of step, each as it was last trained."""
    by_step = {event.step: event for event in of_kind(events, InnerEvent)}
    return [by_step[step] for step in sorted(by_step)]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
