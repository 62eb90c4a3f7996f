"""The fate of every token, from the ledgers of a run's clusters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsx.outer.leases import Leases, Ranges, count
from dsx.tracking.ledger import EndLine, Line, RoundLine, StartLine, StepLine


@dataclass(frozen=True)
class ClusterFate:
    """Tokens that one cluster trained."""

    trained: int
    committed: int
    """Part of the model."""
    pending: int
    """Not yet, but its samples are still on lease to the cluster."""

    @property
    def lost(self) -> int:
        """Trained, and lost with a round that was not committed."""
        return self.trained - self.committed - self.pending


@dataclass(frozen=True)
class Audit:
    """What came of all tokens."""

    rounds: int
    """Committed rounds of the run's history."""
    clusters: Mapping[str, ClusterFate]
    never_trained: int
    """Tokens that were passed over: neither committed, nor on lease, nor waiting to be dealt."""
    trained_twice: int
    """Tokens that became part of the model more than once."""
    open: int
    """Tokens on lease or given back at the end, and not part of the model."""
    problems: Sequence[str] = field(default_factory=tuple)
    """Why the ledgers can't be right together."""

    @property
    def is_clean(self) -> bool:
        return not (self.never_trained or self.trained_twice or self.problems)

    def as_json(self) -> dict[str, Any]:
        """As `dsx audit --json` prints it."""
        clusters = {
            name: {**asdict(fate), "lost": fate.lost} for name, fate in self.clusters.items()
        }
        return {**asdict(self), "clusters": clusters, "is_clean": self.is_clean}


def audit(ledgers: Mapping[str, Sequence[Line]]) -> Audit:
    """Replay the ledgers of all clusters of one run."""
    seq_len = next(line.seq_len for line in ledgers[min(ledgers)] if isinstance(line, StartLine))
    newest = _newest(ledgers)
    history, problems = _history(ledgers, newest)
    problems += _disagreements(ledgers, history, newest)
    by_cluster: dict[str, Ranges] = {}
    for leases in history:
        for name, ranges in leases.committed.items():
            by_cluster.setdefault(name, []).extend(ranges)
    end = newest.leases
    committed, twice = _union(r for ranges in by_cluster.values() for r in ranges)
    open_ranges, _ = _union([*end.returned, *(r for held in end.held.values() for r in held)])
    known, overlap = _union([*committed, *open_ranges])
    if overlap:
        problems.append(f"{overlap * seq_len} tokens are committed and on lease or given back")
    fates = {}
    for name in sorted({*ledgers, *by_cluster}):
        mine, _ = _union(by_cluster.get(name, []))
        if name not in ledgers:
            problems.append(
                f"cluster {name} took part, but its ledger is not here; give its run folder, too"
            )
            continue
        steps = [r for line in ledgers[name] if isinstance(line, StepLine) for r in line.trained]
        trained, _ = _union(steps)
        unknown = count(mine) - _common(mine, trained)
        if unknown:
            problems.append(
                f"{unknown * seq_len} tokens of cluster {name} are committed, but its ledger does "
                "not say that they were trained"
            )
        pending = _common(_union(_living(ledgers[name]))[0], _union(end.held.get(name, []))[0])
        fates[name] = ClusterFate(
            trained=count(steps) * seq_len,
            committed=count(by_cluster.get(name, [])) * seq_len,
            pending=pending * seq_len,
        )
    return Audit(
        rounds=newest.round,
        clusters=fates,
        never_trained=(end.frontier - count(known)) * seq_len,
        trained_twice=twice * seq_len,
        open=count(open_ranges) * seq_len,
        problems=tuple(problems),
    )


def _states(lines: Iterable[Line]) -> list[StartLine | RoundLine]:
    return [line for line in lines if isinstance(line, StartLine | RoundLine)]


def _newest(ledgers: Mapping[str, Sequence[Line]]) -> StartLine | RoundLine:
    """The last state of the run: of the clusters' own last ones, that of the latest round."""
    return max((_states(lines)[-1] for lines in ledgers.values()), key=lambda line: line.round)


def _history(
    ledgers: Mapping[str, Sequence[Line]], newest: StartLine | RoundLine
) -> tuple[list[Leases], list[str]]:
    """All rounds that led to the last state, and what is missing of them."""
    known = {
        line.leases.history: line.leases for lines in ledgers.values() for line in _states(lines)
    }
    rounds = [newest.leases]
    for number in range(newest.round - 1, 0, -1):
        before = known.get(rounds[-1].parent)
        if before is None:
            return rounds, [f"no ledger tells what round {number} committed"]
        rounds.append(before)
    return (rounds if newest.round else []), []


def _disagreements(
    ledgers: Mapping[str, Sequence[Line]], history: Sequence[Leases], newest: StartLine | RoundLine
) -> list[str]:
    """Where clusters say different things of the same round."""
    problems = []
    counted = {leases.history for leases in history}
    digests: dict[str, tuple[str, str]] = {}
    for name, lines in ledgers.items():
        last = _states(lines)[-1]
        if last.round and last.leases.history not in counted:
            problems.append(
                f"cluster {name} ended with a round {last.round} that is not the one of the run's "
                f"history (history {last.leases.history})"
            )
        # A round that was made again, after all had died, may have other bits than at first.
        made = {line.leases.history: line for line in lines if isinstance(line, RoundLine)}
        for line in made.values():
            if line.leases.history in counted:
                first, digest = digests.setdefault(line.leases.history, (name, line.shared_digest))
                if digest != line.shared_digest:
                    problems.append(
                        f"clusters {first} and {name} held different shared weights after round "
                        f"{line.round} (digests {digest} and {line.shared_digest})"
                    )
    return problems


def _living(lines: Sequence[Line]) -> Ranges:
    """What the cluster trained in its last life, or brought into it."""
    if isinstance(lines[-1], EndLine):
        return []
    living: Ranges = []
    for line in lines:
        if isinstance(line, StartLine):
            living = list(line.trained)
        elif isinstance(line, StepLine):
            living += line.trained
    return living


def _union(ranges: Iterable[tuple[int, int]]) -> tuple[Ranges, int]:
    """Ascending and disjoint; and how many positions were there more than once, each time after
    the first."""
    union: Ranges = []
    again = 0
    for start, end in sorted(ranges):
        if union and start <= union[-1][1]:
            low, high = union[-1]
            again += max(0, min(end, high) - start)
            union[-1] = (low, max(high, end))
        else:
            union.append((start, end))
    return union, again


def _common(one: Ranges, other: Ranges) -> int:
    """Positions that are in both of two unions."""
    return count(one) + count(other) - count(_union([*one, *other])[0])


def table(result: Audit) -> Iterator[str]:
    """As text, line by line."""
    heads = ("trained", "committed", "not yet", "lost")
    rows = {
        name: (fate.trained, fate.committed, fate.pending, fate.lost)
        for name, fate in result.clusters.items()
    }
    if len(rows) > 1:
        rows["all"] = tuple(map(sum, zip(*rows.values(), strict=True)))  # type: ignore[assignment]
    width = max(map(len, ["cluster", *rows]))
    yield f"tokens in {result.rounds} committed rounds"
    yield f"{'cluster':{width}}" + "".join(f"{head:>16}" for head in heads)
    for name, numbers in rows.items():
        yield f"{name:{width}}" + "".join(f"{number:>16,}" for number in numbers)
    yield f"on lease or given back at the end: {result.open:,}"
    yield f"never trained: {result.never_trained:,}"
    yield f"trained twice: {result.trained_twice:,}"
    yield from (f"problem: {problem}" for problem in result.problems)
