"""From a settings file and command-line overrides to checked `Settings`."""

import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from dsx.errors import SettingsError
from dsx.settings.base import Block
from dsx.settings.checks import cross_field_problems
from dsx.settings.problems import (
    Implied,
    Overrides,
    key_and_value,
    settings_error,
    show,
    translate,
)
from dsx.settings.settings import Settings
from dsx.settings.tree import blocks_at

AnyBlock = TypeVar("AnyBlock", bound=Block)


def load_settings(path: str | Path, overrides: Overrides = ()) -> Settings:
    """The settings in the JSON file at `path`, with `overrides` applied and all checks done.

    An override is `dotted.key=VALUE`; VALUE is read as JSON where it is JSON, else as text.
    Raises `SettingsError` that lists every problem with its key, value, limit and fix.
    """
    return load_with_raw(path, overrides)[1]


def load_with_raw(path: str | Path, overrides: Overrides = ()) -> tuple[dict[str, Any], Settings]:
    """What `load_settings` gives, behind the JSON that it came from, overrides included."""
    raw = read_json(path)
    for override in overrides:
        try:
            apply_override(raw, key_and_value(override))
        except SettingsError:
            # What the file has in the place of a block is told by the check of the whole of it.
            if not isinstance(override, Implied):
                raise
    return raw, parse_settings(raw, str(path), overrides)


def parse_settings(
    raw: dict[str, Any], source: str = "settings", overrides: Overrides = ()
) -> Settings:
    """`raw` (the parsed JSON of a whole file) as checked `Settings`.

    `source` names it in errors, and whichever of the `overrides` in it has set a refused value.
    Raises `SettingsError` that lists every problem.
    """
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise settings_error(source, translate(error, raw, Settings), overrides) from None
    problems = cross_field_problems(settings)
    if problems:
        raise settings_error(source, problems, overrides)
    return settings


def parse_block(raw: dict[str, Any], kind: type[AnyBlock], source: str) -> AnyBlock:
    """`raw` as one checked block by itself. Raises `SettingsError` that lists every problem."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise settings_error(source, translate(error, raw, kind)) from None


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises `SettingsError` when it can't be read, isn't JSON (naming line and column), holds a key
    twice, or isn't an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: no such settings file (looked in {Path.cwd()}); the shipped ones are in "
            "configs/"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: can't be read as a text file: {error}") from None

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            key = next(name for name in names if names.count(name) > 1)
            raise SettingsError(
                f'{path}: the key "{key}" is written twice in one object '
                f"(it is on lines {_lines_with(key, text)}); delete one"
            )
        return seen

    try:
        raw = json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
            f"{_json_advice(text, error)}"
        ) from None
    except RecursionError:
        raise SettingsError(f"{path}: nested too deeply to be a settings file") from None
    if not isinstance(raw, dict):
        raise SettingsError(f"{path}: holds {show(raw)}; a settings file is a JSON object {{...}}")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=VALUE` in `raw`, in place; unknown keys are found by the validation.

    Raises `SettingsError` when it has another form or leads through a plain value.
    """
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise SettingsError(
            f"--set {override}: expected KEY=VALUE, as in --set dsx.outer.local_steps=10"
        )
    here = raw
    for depth, name in enumerate(path[:-1], start=1):
        inner = here.setdefault(name, {})
        if not isinstance(inner, dict):
            block = ".".join(path[:depth])
            raise SettingsError(
                f"--set {override}: {block} is {show(inner)} and holds no keys; set it as a whole, "
                f"as in --set '{block}=JSON'"
            )
        here = inner
    here[path[-1]] = _value(path, text)


def _value(path: tuple[str, ...], text: str) -> Any:
    """JSON where `text` is JSON; else, and where only text is wanted, the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, str) or value is None:
        return value
    return text if _takes_only_text(path) else value


def _takes_only_text(path: tuple[str, ...]) -> bool:
    annotations = [
        block.model_fields[path[-1]].annotation
        for block in blocks_at(Settings, path[:-1])
        if path[-1] in block.model_fields
    ]
    return bool(annotations) and all(
        set(get_args(annotation) or (annotation,)) <= {str, type(None)}
        for annotation in annotations
    )


def _lines_with(key: str, text: str) -> str:
    pattern = re.compile(re.escape(json.dumps(key)) + r"\s*:")
    lines = [str(text.count("\n", 0, match.start()) + 1) for match in pattern.finditer(text)]
    return ", ".join(lines) or "written with escapes"


def _json_advice(text: str, error: json.JSONDecodeError) -> str:
    line = text.splitlines()[error.lineno - 1] if text.strip() else ""
    before = text[: error.pos].rstrip()
    if re.search(r"(^|\s)(//|#)", line):
        return " (JSON has no comments)"
    if before.endswith(",") and text[error.pos : error.pos + 1] in "]}":
        return " (no comma after the last entry)"
    if "'" in line:
        return ' (JSON quotes with ")'
    return ""
