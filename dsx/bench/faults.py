"""Faults at chosen moments of a run: what `dsx bench chaos` and the fault tests do to it.

A plan is a file of one JSON object a line, to which faults may be added while the run goes on. The
ranks look at it at every phase of a round, and do to themselves what it says.
"""

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["kill", "stop", "disk"]

PHASES: dict[str, tuple[str, int]] = {
    "before the quorum": ("join", 1),
    "headers under way": ("headers", 1),
    "before encoding": ("encode", 1),
    "while encoding": ("encode", 3),
    "in mid-transfer": ("transfer", 2),
    "between transfer and commit": ("transferred", 1),
    "votes under way": ("vote", 1),
    "in mid-commit": ("commit", 1),
    "while saving": ("save", 1),
    "while healing": ("heal", 2),
}
"""Name -> the engine's phase, and the how manieth time of it in a round."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank of a cluster, once."""

    name: str
    cluster: str
    rank: int
    phase: str
    """One of `PHASES`."""
    kind: Kind
    round: int
    """From this round on, whenever its moment comes."""


def fail_at(cluster: str, stage: int, phase: str, round_: int, kind: Kind = "kill") -> Fault:
    """The fault that befalls the first replica of a stage."""
    if phase not in PHASES:
        raise ValueError(f"{phase!r} is no phase; one of: {', '.join(PHASES)}")
    return Fault(f"{cluster}-{stage}-{kind}-{round_}", cluster, stage, phase, kind, round_)


class Plan:
    """The file that whoever breaks a run and its ranks share."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, fault: Fault) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(fault)) + "\n")

    def faults(self) -> list[Fault]:
        try:
            whole = self._file.read_text(encoding="utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [Fault(**json.loads(line)) for line in whole]

    def claim(self, fault: Fault) -> bool:
        """Whether the fault is the caller's to do: it happens once, whoever comes back to it."""
        try:
            self._mark(fault).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def happened(self, fault: Fault) -> bool:
        return self._mark(fault).exists()

    def _mark(self, fault: Fault) -> Path:
        return self._file.with_name(f"{self._file.name}.{fault.name}")


class Injector:
    """One rank's: to be told of every phase."""

    def __init__(self, plan: Plan, cluster: str, rank: int, round_: Callable[[], int]) -> None:
        self._plan = plan
        self._cluster = cluster
        self._rank = rank
        self._round = round_
        self._times: dict[str, int] = {}

    def phase(self, phase: str) -> None:
        """May not return."""
        if phase == "join":
            self._times = {}
        times = self._times[phase] = self._times.get(phase, 0) + 1
        for fault in self._plan.faults():
            mine = fault.cluster == self._cluster and fault.rank == self._rank
            if not mine or self._round() < fault.round or PHASES[fault.phase][0] != phase:
                continue
            if phase != "save" and times != PHASES[fault.phase][1]:
                continue
            if self._plan.claim(fault):
                _do(fault)


def _do(fault: Fault) -> None:
    if fault.kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
