"""The fate of every token, from the ledgers of a run's clusters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsx.outer.leases import Leases, Ranges, count, without
from dsx.tracking.ledger import EndLine, Line, RoundLine, StartLine, StepLine, ledger_name


@dataclass(frozen=True)
class Kept:
    """What a cluster that does not run has in its newest checkpoint."""

    name: str | None = None
    """Of the checkpoint; None: it has none."""
    unsent: Ranges = field(default_factory=list)
    """Samples that were trained, and exchanged once the run goes on."""
    round: int = 0
    """Rounds committed in the shared state that belongs to it."""
    leases: Leases = field(default_factory=Leases)
    """Of that state."""


@dataclass(frozen=True)
class ClusterFate:
    """Tokens that one cluster trained."""

    trained: int
    committed: int
    """Part of the model."""
    pending: int
    """Not yet, but they still can be: their samples are on lease to the cluster, and the cluster
    runs, or has them in its newest checkpoint."""
    lost: int
    """Trained in vain."""


@dataclass(frozen=True)
class Audit:
    """What came of all tokens."""

    rounds: int
    """Committed rounds of the run's history, in the newest state that there is."""
    clusters: Mapping[str, ClusterFate]
    never_trained: int
    """Tokens that were passed over: neither committed, nor on lease, nor waiting to be dealt."""
    trained_twice: int
    """Tokens that became part of the model more than once."""
    open: int
    """Tokens on lease or given back at the end, and not part of the model."""
    problems: Sequence[str] = field(default_factory=tuple)
    """Why the ledgers can't be right together."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What decides on the fate of tokens that are not committed."""

    @property
    def is_clean(self) -> bool:
        return not (self.never_trained or self.trained_twice or self.problems)

    def as_json(self) -> dict[str, Any]:
        """As `dsx audit --json` prints it."""
        return {**asdict(self), "is_clean": self.is_clean}


def audit(ledgers: Mapping[str, Sequence[Line]], kept: Mapping[str, Kept] | None = None) -> Audit:
    """Replay the ledgers of all clusters of one run.

    Args:
        kept: by cluster, for those that do not run; the others do.
    """
    kept = kept or {}
    seq_len = next(line.seq_len for line in ledgers[min(ledgers)] if isinstance(line, StartLine))
    newest = _newest(ledgers)
    history, problems = _history(ledgers, newest)
    problems += _disagreements(ledgers, history, newest)
    rounds, end, history, notes = _what_is_left(kept, set(ledgers), newest, history)
    by_cluster: dict[str, Ranges] = {}
    for leases in history:
        for name, ranges in leases.committed.items():
            by_cluster.setdefault(name, []).extend(ranges)
    committed, twice = _union(r for ranges in by_cluster.values() for r in ranges)
    open_ranges, _ = _union([*end.returned, *(r for held in end.held.values() for r in held)])
    known, overlap = _union([*committed, *open_ranges])
    if overlap:
        problems.append(f"{overlap * seq_len} tokens are committed and on lease or given back")
    fates = {}
    for name in sorted({*ledgers, *by_cluster}):
        if name not in ledgers:
            problems.append(
                f"cluster {name} took part, but its ledger is not here; give its run folder, too"
            )
            continue
        steps = _trained(ledgers[name])
        trained, _ = _union(steps)
        mine, _ = _union(by_cluster.get(name, []))
        counted = _common(mine, trained)
        if counted < count(mine):
            problems += _unknown(name, trained, history, ledgers, seq_len)
        pending, told = _pending(name, ledgers[name], kept.get(name), mine, end, seq_len)
        notes += told
        fates[name] = ClusterFate(
            trained=count(steps) * seq_len,
            committed=count(by_cluster.get(name, [])) * seq_len,
            pending=pending * seq_len,
            lost=(count(steps) - counted - pending) * seq_len,
        )
    return Audit(
        rounds=rounds,
        clusters=fates,
        never_trained=(end.frontier - count(known)) * seq_len,
        trained_twice=twice * seq_len,
        open=count(open_ranges) * seq_len,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _trained(lines: Sequence[Line]) -> Ranges:
    """Samples of all inner steps, those included that were brought from another run folder."""
    steps: Ranges = []
    for line in lines:
        if isinstance(line, StepLine):
            steps += line.trained
        elif isinstance(line, StartLine):
            steps += without(line.trained, steps)
    return steps


def _unknown(
    name: str,
    trained: Ranges,
    history: Sequence[Leases],
    ledgers: Mapping[str, Sequence[Line]],
    seq_len: int,
) -> Iterator[str]:
    """Rounds that committed what a cluster never trained."""
    numbers = {s.leases.history: s.round for lines in ledgers.values() for s in _states(lines)}
    for leases in reversed(history):
        if unknown := count(without(leases.committed.get(name, []), trained)):
            yield (
                f"{unknown * seq_len} tokens of cluster {name} are committed in round "
                f"{numbers[leases.history]}, but its ledger does not say that they were trained: "
                f"{ledger_name(name)} was changed or cut; bring it back from a copy"
            )


def _pending(
    name: str,
    lines: Sequence[Line],
    kept: Kept | None,
    committed: Ranges,
    end: Leases,
    seq_len: int,
) -> tuple[int, list[str]]:
    """Samples that a cluster has trained and can still bring in, and what decided on that."""
    living = without(_union(_living(lines))[0], committed)
    held, _ = _union(end.held.get(name, []))
    if kept is None:
        return _common(living, held), []
    pending = _common(_common_part(living, _union(kept.unsent)[0]), held)
    notes = []
    where = f"its newest checkpoint ({kept.name})" if kept.name else "any checkpoint"
    if pending:
        notes.append(
            f"cluster {name} does not run: {pending * seq_len:,} tokens are in {where}, and count "
            "once it goes on"
        )
    if lost := count(living) - pending:
        notes.append(
            f"cluster {name} does not run: the {lost * seq_len:,} tokens that it trained last are "
            f"lost, as they are not in {where}, or not on lease to it any more"
        )
    return pending, notes


def _what_is_left(
    kept: Mapping[str, Kept],
    clusters: set[str],
    newest: StartLine | RoundLine,
    history: list[Leases],
) -> tuple[int, Leases, list[Leases], list[str]]:
    """The newest state that there is: in a cluster that runs, or else in a checkpoint.

    Returns:
        its round, its leases, the rounds that led to it, and what there is to say about that.
    """
    as_told = newest.round, newest.leases, history
    saved = [one for one in kept.values() if one.name is not None]
    if clusters - kept.keys():
        return *as_told, []
    if not saved:
        return *as_told, ["no cluster runs, and there is no checkpoint of these rounds here"]
    best = max(saved, key=lambda one: one.round)
    digests = [leases.history for leases in history]
    if best.round == 0:
        digests.append(best.leases.history)
    if best.round >= newest.round or best.leases.history not in digests:
        return *as_told, []
    note = (
        f"no cluster runs, and the newest checkpoint holds round {best.round}: rounds "
        f"{best.round + 1} to {newest.round} were committed and are lost, and are made again when "
        "the run goes on"
    )
    return best.round, best.leases, history[digests.index(best.leases.history) :], [note]


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
        made, two = _made(lines)
        problems += [
            f"cluster {name} held two states after round {one.round} (digests {one.shared_digest} "
            f"and {other.shared_digest}), and had not gone back to a checkpoint in between"
            for one, other in two
        ]
        for line in made:
            if line.leases.history in counted:
                first, digest = digests.setdefault(line.leases.history, (name, line.shared_digest))
                if digest != line.shared_digest:
                    problems.append(
                        f"clusters {first} and {name} held different shared weights after round "
                        f"{line.round} (digests {digest} and {line.shared_digest})"
                    )
    return problems


def _made(lines: Sequence[Line]) -> tuple[list[RoundLine], list[tuple[RoundLine, RoundLine]]]:
    """The rounds of a ledger as they came to stand, and those that it tells in two ways.

    What a start from an older state has undone is made again, and may then have other bits than at
    first: sums on GPUs do not always come in the same order.
    """
    made: dict[str, RoundLine] = {}
    two = []
    for line in lines:
        if isinstance(line, StartLine):
            made = {digest: kept for digest, kept in made.items() if kept.round <= line.round}
        elif isinstance(line, RoundLine):
            first = made.setdefault(line.leases.history, line)
            if first.shared_digest != line.shared_digest:
                two.append((first, line))
    return [*made.values()], two


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


def _common_part(one: Ranges, other: Ranges) -> Ranges:
    """The positions themselves."""
    return without(one, without(one, other))


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
    yield from result.notes
    yield from (f"problem: {problem}" for problem in result.problems)
