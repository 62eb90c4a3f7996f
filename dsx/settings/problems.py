"""What is wrong with a settings file, in words: every problem with its key, limit and fix."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dsx.errors import SettingsError
from dsx.settings.base import Block, FieldError
from dsx.settings.tree import blocks_at, explain_unknown, nearest_value


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the full dotted key, and what to do about it."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass(frozen=True)
class Implied:
    """An override that no `--set` says, as it follows from another argument."""

    override: str
    """`KEY=VALUE`."""
    argument: str
    """As it was typed: `--clusters 2`."""


Overrides = Sequence[str | Implied]
"""In the order in which they apply; a plain `KEY=VALUE` is that of a `--set`."""


def key_and_value(override: str | Implied) -> str:
    return override.override if isinstance(override, Implied) else override


def settings_error(
    source: str, problems: Sequence[Problem], overrides: Overrides = ()
) -> SettingsError:
    """One error that lists all `problems` of the settings in `source`, a line each.

    Those that come of one of the `overrides` name it.
    """
    set_by = {problem: _set_by(problem.key, overrides) for problem in problems}
    if len(problems) == 1:
        (problem,) = problems
        return SettingsError(f"{set_by[problem] or source}: {problem}")
    lines = [
        f"\n  {problem}" + (f" ({set_by[problem]})" if set_by[problem] else "")
        for problem in problems
    ]
    return SettingsError(f"{source}: {len(problems)} problems{''.join(lines)}")


def _set_by(key: str, overrides: Overrides) -> str:
    """The last argument that has set `key` or a block around it, as it was typed; else empty."""
    for override in reversed(overrides):
        path = key_and_value(override).partition("=")[0].strip()
        if key == path or key.startswith((f"{path}.", f"{path}[")):
            return override.argument if isinstance(override, Implied) else f"--set {override}"
    return ""


def show(value: object) -> str:
    """A value as it stands in the file, shortened to what fits into a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def translate(error: ValidationError, raw: object, model: type[Block]) -> list[Problem]:
    """pydantic's findings about `raw` as problems; several about one key become one."""
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        key = _key_of(item["loc"], raw, missing=item["type"] == "missing")
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, FieldError):
            found.setdefault(".".join((*key, cause.field)), []).append(cause.text)
            continue
        if item["type"].startswith("union_tag"):
            key = (*key, "type")
        texts = found.setdefault(".".join(key), [])
        text = _explain(item, key, raw, model)
        if text not in texts:
            texts.append(text)
    return [
        Problem(key, _merge(texts)) for key, texts in found.items() if not _is_shadowed(key, found)
    ]


def _is_shadowed(key: str, found: dict[str, list[str]]) -> bool:
    """Whether `key` only has the wrong type for another member of a union than the one meant."""
    deeper = any(other.startswith((f"{key}.", f"{key}[")) for other in found)
    return deeper and all(_WANTED in text for text in found[key])


def _key_of(loc: Sequence[int | str], raw: object, missing: bool) -> tuple[str, ...]:
    """The path inside the file: pydantic's location without the names of union members.

    `missing`: the last part names what is not there.
    """
    path: list[str] = []
    value = raw
    for depth, part in enumerate(loc, start=1):
        absent = missing and depth == len(loc)
        if isinstance(part, int) and isinstance(value, list | tuple):
            path[-1] += f"[{part}]"
            value = None if absent else value[part]
        elif absent or (isinstance(value, dict) and part in value):
            path.append(str(part))
            value = value[part] if isinstance(value, dict) and not absent else None
    return tuple(path)


EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": 'a text in "quotes"',
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a JSON object {...}",
    "model_type": "a JSON object {...}",
    "model_attributes_type": "a JSON object {...}",
}
"""By pydantic's name of what is wrong."""
_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_WANTED = "expected "


def _explain(item: Any, key: tuple[str, ...], raw: object, model: type[Block]) -> str:
    kind, context, value = item["type"], item.get("ctx", {}), item["input"]
    if kind == "extra_forbidden":
        return explain_unknown(model, key, raw)
    if kind in ("missing", "union_tag_not_found"):
        return _explain_missing(key, raw, model)
    if kind in EXPECTED:
        return f"is {show(value)}; {_WANTED}{EXPECTED[kind]}{_type_advice(value)}"
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        return f"is {show(value)}; it must be {words} {context[name]:g}"
    if kind == "literal_error":
        return f"is {show(value)}; {_WANTED}{context['expected']}{nearest_value(value, context)}"
    if kind == "union_tag_invalid":
        tag, options = context["tag"], {"expected": context["expected_tags"]}
        return f"is {show(tag)}; it is none of {options['expected']}{nearest_value(tag, options)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("too_short", "string_too_short"):
        return f"is {show(value)}; it must not be empty"
    return f"is {show(value)}; {item['msg']}"


def _explain_missing(key: tuple[str, ...], raw: object, model: type[Block]) -> str:
    for block in blocks_at(model, key[:-1], raw):
        field = block.model_fields.get(key[-1])
        if field is not None:
            return f"is required but missing. {field.description or ''}".rstrip()
    return "is required but missing"


def _type_advice(value: object) -> str:
    if value == "auto":
        return ' ("auto" is filled in by the HF Trainer; write the value itself)'
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return ""
        return f" (write {value} without quotes)"
    if isinstance(value, float) and value.is_integer():
        return f" (write {int(value)})"
    return ""


def _merge(texts: list[str]) -> str:
    """The alternatives of a union as one sentence: `is 1.5; expected an integer or 'auto'`."""
    heads = {text.partition(_WANTED)[0] for text in texts}
    if len(texts) == 1 or len(heads) != 1 or not all(_WANTED in text for text in texts):
        return "; ".join(texts)
    return heads.pop() + _WANTED + " or ".join(text.partition(_WANTED)[2] for text in texts)
