"""The settings models as a tree of dotted keys: walking it, and finding the nearest right name."""

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dsx.settings.base import Block


def blocks_in(annotation: Any) -> list[type[Block]]:
    """The blocks that a field of this annotation may hold, unions taken apart."""
    if get_origin(annotation) is Annotated:
        return blocks_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [block for member in get_args(annotation) for block in blocks_in(member)]
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return [annotation]
    return []


def kind_of(block: type[Block]) -> str | None:
    """The `type` that tells this block from the others of a union, if it has one."""
    field = block.model_fields.get("type")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    return str(get_args(field.annotation)[0])


def blocks_at(model: type[Block], path: Sequence[str], raw: object = None) -> list[type[Block]]:
    """The blocks that may stand at `path` below `model`; none if `path` leads to no block.

    Where a `type` in `raw`, the parsed file, chooses among several blocks, only that one.
    """
    here = [model]
    for key in path:
        raw = raw.get(key) if isinstance(raw, Mapping) else None
        inner = [
            block
            for outer in here
            if key in outer.model_fields
            for block in blocks_in(outer.model_fields[key].annotation)
        ]
        kind = raw.get("type") if isinstance(raw, Mapping) else raw
        here = [block for block in inner if kind is not None and kind_of(block) == kind] or inner
    return here


def refusals(model: type[Block], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every refused key below `model` as a dotted path, with the reason; outer ones first."""
    for name, reason in model.unsupported.items():
        yield ".".join((*prefix, name)), reason
    for name, field in model.model_fields.items():
        for block in blocks_in(field.annotation):
            yield from refusals(block, (*prefix, name))


def walk(model: type[Block], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key below `model`, outer ones first."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for block in blocks_in(field.annotation):
            yield from walk(block, (*prefix, name))


def explain_unknown(model: type[Block], path: tuple[str, ...], raw: object) -> str:
    """Why the key at `path` of the parsed file `raw` is refused, and the nearest right name."""
    *outer, key = path
    here = blocks_at(model, outer, raw)
    unsupported = {name: why for block in here for name, why in block.unsupported.items()}
    if key in unsupported:
        return f"can't be used: {unsupported[key]}"
    siblings = list(dict.fromkeys(name for block in here for name in block.model_fields))
    if any(key in block.model_fields for block in blocks_at(model, outer)):
        return f"does not go with the chosen `type`, which has {', '.join(siblings)}"
    elsewhere = [".".join(found) for found in dict.fromkeys(walk(model)) if found[-1] == key]
    # A key that is right in another block beats one that only resembles a key of this block.
    near = _closest(key, [*siblings, *unsupported], cutoff=0.8 if elsewhere else 0.6)
    if near in unsupported:
        return f"is unknown; it looks like `{near}`, which can't be used: {unsupported[near]}"
    advice = f"did you mean {'.'.join((*outer, near))}?" if near else ""
    if elsewhere:
        places = " or ".join(f"{_block_of(found)} ({found})" for found in elsewhere[:3])
        text = f"is unknown here; it belongs under {places}"
        return f"{text}; or {advice}" if advice else text
    if advice:
        return f"is unknown; {advice}"
    return _explain_far(model, key) or f"is unknown; {_block_of('.'.join(path))} has " + ", ".join(
        siblings
    )


def _explain_far(model: type[Block], key: str) -> str | None:
    """What the whole tree says about a key that resembles nothing in its own block."""
    for dotted, reason in refusals(model):
        if dotted.rpartition(".")[2] == key:
            return f"is unknown here; as {dotted} it can't be used: {reason}"
    names = {found[-1]: ".".join(found) for found in walk(model)}
    near = _closest(key, list(names), cutoff=0.75)
    return f"is unknown; did you mean {names[near]}?" if near else None


def _block_of(dotted: str) -> str:
    return dotted.rpartition(".")[0] or "the top level"


def nearest_value(value: object, context: Mapping[str, Any]) -> str:
    """`; did you mean "x"?` for a text that resembles one of the allowed ones, else nothing."""
    if not isinstance(value, str):
        return ""
    near = _closest(value, re.findall(r"'([^']*)'", context["expected"]), cutoff=0.5)
    return f'; did you mean "{near}"?' if near else ""


def _closest(word: str, options: Sequence[str], cutoff: float) -> str | None:
    plain = {option.lower().replace("-", "_"): option for option in options}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None
