"""From the command's arguments to the runs that it asks for."""

import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsx.errors import SettingsError
from dsx.settings.dsx_block import DsxSettings
from dsx.settings.loading import apply_override
from dsx.simulation.inner import Inner
from dsx.simulation.spec import Kind, RunSpec

Choices = Mapping[str, Sequence[str]]
"""Full settings key -> the values to try, as text."""


def read_choices(arguments: Sequence[str]) -> dict[str, list[str]]:
    """`outer.lr=0.5,0.7` as {"dsx.outer.lr": ["0.5", "0.7"]}.

    A key that begins with a part of the `dsx` block is seen from there. Commas inside of JSON
    brackets, braces and quotes separate nothing.

    Raises:
        SettingsError: an argument of another form, or a key given twice.
    """
    choices: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = [value for value in _split(text) if value]
        if not equals or not key or not values:
            raise SettingsError(f"{argument}: expected KEY=VALUE,VALUE, as in outer.lr=0.5,0.7")
        key = full_key(key)
        if key in choices:
            raise SettingsError(f"{key} is given twice; put all its values after one KEY=")
        choices[key] = values
    return choices


def full_key(key: str) -> str:
    """The key in the whole file of a key that may be seen from the `dsx` block."""
    return f"dsx.{key}" if key.partition(".")[0] in DsxSettings.model_fields else key


def combinations(choices: Choices) -> Iterator[dict[str, str]]:
    """The Cartesian product, the last key varying fastest; one empty one without choices."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def plan_runs(
    raw: Mapping[str, Any],
    *,
    clusters: int,
    sweep: Choices,
    baselines: Sequence[Kind],
    tune: Choices,
    seeds: Sequence[int],
    inner: Inner,
) -> list[RunSpec]:
    """Every run, baselines first, each once.

    A baseline is made for every value of `tune`, and again for every value of a swept key that it
    depends on other than the optimizer's (whose tuning is what `tune` is for).

    Args:
        raw: the settings file's JSON, overrides applied.
    """
    specs: list[RunSpec] = []
    for kind in baselines:
        shared = {key: values for key, values in sweep.items() if applies_to_baselines(key)}
        for combination in combinations({**shared, **tune}):
            specs += [_spec(raw, kind, clusters, inner, combination, seed) for seed in seeds]
    for combination in combinations(sweep):
        specs += [_spec(raw, "clusters", clusters, inner, combination, seed) for seed in seeds]
    unique = {spec.model_dump_json(): spec for spec in specs}
    return list(unique.values())


def applies_to_baselines(key: str) -> bool:
    """Whether a swept key changes what a baseline must be compared with."""
    return not f"{key}.".startswith(("dsx.outer.", "optimizer."))


def _spec(
    raw: Mapping[str, Any],
    kind: Kind,
    clusters: int,
    inner: Inner,
    combination: Mapping[str, str],
    seed: int,
) -> RunSpec:
    changed = copy.deepcopy(dict(raw))
    for key, value in {**combination, "dsx.seed": str(seed)}.items():
        apply_override(changed, f"{key}={value}")
    told = {key: _read(value) for key, value in combination.items()}
    return RunSpec(
        kind=kind,
        raw=changed,
        clusters=clusters,
        inner=inner,
        changed={**told, "dsx.seed": seed},
    )


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _split(text: str) -> Iterator[str]:
    depth, start, quoted = 0, 0, False
    for at, sign in enumerate(text):
        if sign == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
