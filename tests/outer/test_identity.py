"""Clusters that train something else are refused, by name and with what differs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsx.errors import ExchangeError
from dsx.exchange.in_process import InProcessHub
from dsx.outer.header import PROTOCOL
from dsx.outer.identity import Identity, refuse_others
from tests.outer.test_header import header

SHAPES = {"a": torch.Size([2, 3]), "b": torch.Size([4])}
FACTS = {"dsx.seed": 0, "dsx.outer.lr": 0.7, "long": ["x"] * 100}


def meet(*identities: Identity, protocols: tuple[int, ...] = ()) -> list[str]:
    """What each cluster is told; "" where nobody is refused."""
    names = "abc"[: len(identities)]
    hub = InProcessHub(names, timeout_seconds=10)
    headers = [
        header(identity=identity.digest, protocol=protocol)
        for identity, protocol in zip(
            identities, protocols or (PROTOCOL,) * len(names), strict=True
        )
    ]

    def one(index: int) -> str:
        exchange = hub.exchange(names[index])
        try:
            refuse_others(exchange, exchange.join(10), headers, identities[index])
        except ExchangeError as refusal:
            return f"{type(refusal).__name__}: {refusal}"
        return ""

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(one, range(len(names))))


def test_the_setting_that_differs_is_named_with_both_values_on_both_sides() -> None:
    one, other = Identity(FACTS, SHAPES), Identity(FACTS | {"dsx.outer.lr": 0.5}, SHAPES)
    first, second, third = meet(one, one, other)
    assert "cluster c trains something else than a: dsx.outer.lr is 0.5 there and 0.7 here" in first
    assert "cluster c trains something else than b" in second
    assert "cluster a trains something else than c: dsx.outer.lr is 0.7 there and 0.5 h" in third


def test_only_who_is_outnumbered_or_tied_has_come_to_the_wrong_run() -> None:
    one, other = Identity(FACTS, SHAPES), Identity(FACTS | {"dsx.seed": 1}, SHAPES)
    kinds = [told.partition(":")[0] for told in meet(one, one, other)]
    assert kinds == ["ExchangeError", "ExchangeError", "ExchangeRefused"]
    assert {told.partition(":")[0] for told in meet(one, other)} == {"ExchangeRefused"}


@pytest.mark.parametrize(
    ("facts", "shapes", "told"),
    [
        (FACTS | {"more": 1}, SHAPES, "more is 1 there and not set here"),
        ({k: v for k, v in FACTS.items() if k != "dsx.seed"}, SHAPES, "dsx.seed is not set there"),
        (FACTS | {"long": ["x"] * 99 + ["y"]}, SHAPES, 'long is ["x", "x"'),
        (FACTS, SHAPES | {"b": torch.Size([2, 2])}, "tensors of this stage is"),
        (FACTS, dict(reversed(SHAPES.items())), "tensors of this stage is"),
    ],
)
def test_every_kind_of_difference_is_found_and_named(facts: dict, shapes: dict, told: str) -> None:
    first, second = meet(Identity(FACTS, SHAPES), Identity(facts, shapes))
    assert told in first
    assert "trains something else" in second


def test_many_differences_are_counted() -> None:
    other = dict.fromkeys(FACTS, "other") | {f"key{index}": index for index in range(20)}
    assert "(and 18 more)" in meet(Identity(FACTS, SHAPES), Identity(other, SHAPES))[0]


def test_nobody_is_refused_where_all_is_the_same() -> None:
    again = Identity(dict(reversed(FACTS.items())), dict(SHAPES))
    assert meet(Identity(FACTS, SHAPES), again) == ["", ""]


def test_another_version_is_not_asked_for_what_it_may_not_know() -> None:
    other = Identity({}, SHAPES)
    assert meet(Identity(FACTS, SHAPES), other, protocols=(PROTOCOL, PROTOCOL + 1)) == ["", ""]
