"""`RUN/ledger-CLUSTER.jsonl`: which samples a cluster trained, and which became part of the model.

One line for every start, inner step and committed round, never rewritten. A cluster that goes on
from an older checkpoint writes the same rounds again; `Leases.history` tells which belong together.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dsx.errors import TrackingError
from dsx.outer.leases import Leases, Range, Ranges, join
from dsx.tracking.jsonl import LineFile

LEDGER_PATTERN = "ledger-*.jsonl"


def ledger_name(cluster: str) -> str:
    """The file of a cluster in its run folder."""
    return LEDGER_PATTERN.replace("*", cluster)


def _disjoint(ranges: Ranges) -> Ranges:
    ordered = sorted(ranges)
    for start, end in ordered:
        if not 0 <= start < end:
            raise ValueError(f"[{start}, {end}) is no range of samples")
    for (start, end), (after, _) in pairwise(ordered):
        if after < end:
            raise ValueError(f"sample {after} is in two ranges, [{start}, {end}) is one")
    return ranges


def _sound(leases: Leases) -> Leases:
    _disjoint([*leases.returned, *(r for held in leases.held.values() for r in held)])
    _disjoint([r for ranges in leases.committed.values() for r in ranges])
    return leases


_Samples = Annotated[Ranges, AfterValidator(_disjoint)]
_Leases = Annotated[Leases, AfterValidator(_sound)]
_Round = Annotated[int, Field(ge=0)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StartLine(_Line):
    """The cluster has met the others."""

    kind: Literal["start"] = "start"
    cluster: str
    seq_len: int = Field(gt=0)
    """Tokens of a sample."""
    round: _Round
    """Rounds committed in the shared state that it goes on from."""
    leases: _Leases
    """Of that state."""
    trained: _Samples
    """What the cluster trained before, and that can still become part of the model."""


class StepLine(_Line):
    """An inner step was made."""

    kind: Literal["step"] = "step"
    step: int
    trained: _Samples


class RoundLine(_Line):
    """A round was committed and applied."""

    kind: Literal["round"] = "round"
    round: _Round
    shared_digest: str
    leases: _Leases
    """After the round."""


class EndLine(_Line):
    """The run is over: what is not part of the model by now never will be."""

    kind: Literal["end"] = "end"


Line = StartLine | StepLine | RoundLine | EndLine
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


class Ledger:
    """What a cluster's reporting rank writes.

    Args:
        run_dir: None on the other ranks, which write nothing.
    """

    def __init__(self, run_dir: Path | str | None, cluster: str) -> None:
        self._cluster = cluster
        self._path = None if run_dir is None else Path(run_dir) / ledger_name(cluster)
        self._file: LineFile | None = None

    def start(self, seq_len: int, round_: int, leases: Leases, trained: Ranges) -> None:
        """Before the first inner step of a launch."""
        self._write(
            StartLine(
                cluster=self._cluster,
                seq_len=seq_len,
                round=round_,
                leases=leases,
                trained=trained,
            )
        )

    def step(self, step: int, samples: list[Range]) -> None:
        """After an inner step, and before its samples can be committed."""
        self._write(StepLine(step=step, trained=join(samples)))

    def round(self, round_: int, shared_digest: str, leases: Leases) -> None:
        """After a committed round was applied."""
        self._write(RoundLine(round=round_, shared_digest=shared_digest, leases=leases))

    def end(self) -> None:
        """After the last exchange."""
        self._write(EndLine())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, line: Line) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._file = LineFile(self._path)
        self._file.write(line.model_dump_json() + "\n")


def read_ledger(path: Path) -> list[Line]:
    """The lines of one cluster, as they were written. One at the end that a killed process did not
    finish is left out.

    Raises:
        TrackingError: naming a line that can't be read.
    """
    lines = []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts[:-1], start=1):
        try:
            lines.append(_LINE.validate_json(text))
        except ValidationError as error:
            raise TrackingError(
                f"{path}, line {number} is no line of a ledger ({text[:40]!r}: "
                f"{error.errors()[0]['msg']}); something else than dsx has changed the file: bring "
                "it back from a copy"
            ) from error
    return lines


def read_ledgers(run_dirs: list[Path]) -> dict[str, list[Line]]:
    """By cluster.

    Raises:
        TrackingError: there is none, or a line can't be read, or a cluster has two.
    """
    ledgers: dict[str, list[Line]] = {}
    for folder in run_dirs:
        for path in sorted(folder.glob(LEDGER_PATTERN)):
            lines = read_ledger(path)
            if not lines or not isinstance(lines[0], StartLine):
                raise TrackingError(f"{path} does not begin with a start; is it complete?")
            if lines[0].cluster in ledgers:
                raise TrackingError(
                    f"{path} is a second ledger of cluster {lines[0].cluster}; give the folders of "
                    "one run"
                )
            ledgers[lines[0].cluster] = lines
    if not ledgers:
        raise TrackingError(
            f"{', '.join(map(str, run_dirs))} holds no {LEDGER_PATTERN}; give the `run_dir` of a "
            "run of several clusters (dsx.train with --coordinator, or dsx local)"
        )
    return ledgers
