"""Who trains which samples: every position is committed once, and none is passed over."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.outer.leases import (
    KEPT_ROUNDS,
    LEASED_ROUNDS,
    Leases,
    Part,
    Ranges,
    contains,
    count,
    join,
    split,
    without,
)


def positions(ranges: Ranges) -> list[int]:
    return [position for start, end in ranges for position in range(start, end)]


def test_ranges_are_split_joined_and_taken_out() -> None:
    assert split([(0, 4), (10, 13)], 5) == ([(0, 4), (10, 11)], [(11, 13)])
    assert split([(0, 4)], 0) == ([], [(0, 4)])
    with pytest.raises(ValueError, match="5 samples are wanted of a lease of 4"):
        split([(0, 4)], 5)
    assert join([(0, 4), (4, 6), (9, 10), (8, 9)]) == [(0, 6), (9, 10), (8, 9)]
    assert without([(0, 10), (20, 30)], [(3, 5), (8, 22)]) == [(0, 3), (5, 8), (22, 30)]


def test_clusters_that_stay_read_the_order_together_window_by_window() -> None:
    """With one inner step a round, the clusters' batches are those of one run on all of them."""
    parts = {"a": Part(shard=4), "b": Part(shard=4)}
    leases = Leases().deal({name: part.shard for name, part in parts.items()})
    for round_ in range(3 * LEASED_ROUNDS):
        for place, name in enumerate(parts):
            first, _ = split(leases.held[name], 4)
            start = (2 * round_ + place) * 4
            assert first == [(start, start + 4)]
        leases = leases.commit({name: Part(4, split(leases.held[name], 4)[0]) for name in parts})
    assert leases.returned == []


def next_round(leases: Leases, *names: str) -> Leases:
    """All of them train four samples."""
    return leases.commit({name: Part(4, split(leases.held[name], 4)[0]) for name in names})


def test_a_cluster_that_stays_away_gives_its_lease_back_and_the_others_train_it() -> None:
    leases = next_round(Leases().deal({"a": 4, "b": 4}), "a", "b")
    kept = leases.held["b"]
    for _ in range(KEPT_ROUNDS):
        leases = next_round(leases, "a")
        assert leases.held["b"] == kept
    back = next_round(leases, "a", "b")
    assert back.committed["b"] == split(kept, 4)[0]
    assert back.missed == {}
    leases = next_round(leases, "a")
    assert "b" not in leases.held
    # The first of it was dealt again at once.
    dealt = set(positions(leases.returned)) | set(positions(leases.held["a"]))
    assert dealt >= set(positions(kept))
    frontier = leases.frontier
    while leases.returned:
        leases = next_round(leases, "a")
        assert leases.frontier <= frontier + 4


def test_a_lease_may_be_trained_in_any_order() -> None:
    leases = Leases().deal({"a": 4}).commit({"a": Part(4, [(8, 10), (4, 6)])})
    assert leases.committed == {"a": [(4, 6), (8, 10)]}
    assert leases.held == {"a": [(0, 4), (6, 8), (10, 4 * LEASED_ROUNDS + 4)]}


def test_a_claim_counts_where_nobody_has_the_positions() -> None:
    leases = Leases(frontier=10, returned=[(2, 4)], held={"a": [(4, 10)]})
    admitted = leases.admit({"a": [(50, 60)], "b": [(2, 4), (12, 14)], "c": [(13, 15)]})
    assert admitted.held == {"a": [(4, 10)], "b": [(2, 4), (12, 14)]}
    assert admitted.frontier == 14
    assert admitted.returned == [(10, 12)]
    assert leases.admit({"b": [(3, 5)]}) == leases
    assert leases.admit({"b": [(12, 13), (12, 13)]}) == leases
    assert leases.admit({}) == leases


def test_a_decision_has_a_digest_that_names_all_before_it() -> None:
    first = Leases().deal({"a": 4})
    one = next_round(first, "a")
    assert one.parent == first.history == ""
    assert one == next_round(first, "a")
    assert one.history != first.commit({"a": Part(4, [(0, 3)])}).history
    two = one.commit({"a": Part(4)})
    assert two.parent == one.history != two.history


@pytest.mark.parametrize("trained", [[(0, 9)], [(0, 1), (0, 1)], [(20, 21)]])
def test_what_is_not_on_lease_is_refused(trained: Ranges) -> None:
    with pytest.raises(ValueError, match="cluster a has"):
        Leases(held={"a": [(0, 8)]}).commit({"a": Part(1, trained)})


@dataclass
class Trainer:
    """A cluster that trains what its lease says, and forgets it when the state says otherwise."""

    todo: Ranges
    trained: Ranges = field(default_factory=list)
    ever: set[int] = field(default_factory=set)

    @property
    def lease(self) -> Ranges:
        return self.trained + self.todo

    def train(self, samples: int) -> None:
        if samples <= count(self.todo):
            taken, self.todo = split(self.todo, samples)
            self.trained = self.trained + taken
            self.ever |= set(positions(taken))

    def take_over(self, held: Ranges, sent: Ranges) -> None:
        live = without(self.trained, sent)
        self.trained = live if contains(held, live) else []
        self.todo = without(held, self.trained)


NAMES = ("a", "b", "c")
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "present": st.sets(st.sampled_from(NAMES)),
            "committed": st.booleans(),
            "steps": st.integers(1, 4),
            "late": st.integers(0, 3),
            "unsound": st.sets(st.sampled_from(NAMES), max_size=1),
            "restarted": st.sets(st.sampled_from(NAMES), max_size=1),
        }
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(rounds=ROUNDS, batches=st.tuples(*[st.integers(1, 3)] * 3))
def test_whoever_comes_goes_or_fails_every_position_is_committed_at_most_once_and_none_is_skipped(
    rounds: list[dict], batches: tuple[int, int, int]
) -> None:
    batch = dict(zip(NAMES, batches, strict=True))
    leases = Leases()
    trainers: dict[str, Trainer] = {}
    committed: Counter[int] = Counter()
    for round_ in rounds:
        for name in round_["restarted"] & trainers.keys():
            trainers[name] = Trainer(leases.held.get(name, []), ever=trainers[name].ever)
        shards = {name: batch[name] * round_["steps"] for name in sorted(round_["present"])}
        # Whoever has nothing goes by a claim on what those in sight leave.
        claims = {n: t.lease for n, t in trainers.items() if n in shards and n not in leases.held}
        admitted = leases.admit(claims)
        new = {n: shards[n] for n in shards if n not in admitted.held}
        for name, claim in admitted.deal(new).held.items():
            if name in new:
                ever = trainers[name].ever if name in trainers else set()
                trainers[name] = Trainer(claim, ever=ever)
        sent = {}
        for name, trainer in trainers.items():
            trainer.train(batch[name] * round_["steps"])
            if name in round_["unsound"]:
                trainer.todo, trainer.trained = trainer.todo + trainer.trained, []
            sent[name] = trainer.trained
        for name, trainer in trainers.items():
            # The others train on while these exchange, or without any exchange.
            trainer.train(batch[name] * round_["late"])
        if not round_["committed"] or not shards:
            continue
        claims = {name: trainers[name].lease for name in shards if name not in leases.held}
        admitted = leases.admit(claims)
        parts = {}
        for name in shards:
            counts = contains(admitted.held.get(name, []), sent[name])
            parts[name] = Part(shards[name], sent[name] if counts else [])
        leases = admitted.commit(parts)
        for name, ranges in leases.committed.items():
            committed.update(positions(ranges))
            assert set(positions(ranges)) <= trainers[name].ever
        for name in shards:
            assert count(leases.held[name]) >= LEASED_ROUNDS * shards[name]
            trainers[name].take_over(leases.held[name], list(parts[name].trained))
    known = Counter(positions(leases.returned))
    for held in leases.held.values():
        known.update(positions(held))
    assert known + committed == Counter(range(leases.frontier)), "once each, and none missing"
