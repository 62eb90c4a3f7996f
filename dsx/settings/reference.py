"""Writes docs/configuration.md from the settings models: `python -m dsx.settings.reference`."""

import inspect
import json
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from dsx.settings.base import Block
from dsx.settings.deepspeed_keys import DeepSpeedSettings
from dsx.settings.dsx_block import DsxSettings
from dsx.settings.settings import Settings
from dsx.settings.tree import blocks_in, kind_of, refusals

DOCUMENT = Path("docs/configuration.md")

_INTRODUCTION = """\
# Settings

<!-- Written by `python -m dsx.settings.reference` from the models in dsx/settings. Edit those. -->

A run is described by one JSON file: DeepSpeed's own keys, as its users know them, plus one `dsx`
block. `configs/quickstart.json` is a complete example. Every command that takes
`--deepspeed_config FILE` also takes `--set KEY=VALUE`, as often as needed:

    dsx local --deepspeed_config configs/quickstart.json --clusters 2 \\
        --set dsx.outer.local_steps=10 --set 'dsx.pipeline.partition=[1, 3]'

KEY is a dotted path; VALUE is read as JSON where it is JSON, else as text.

Nothing is guessed: a key that nobody knows, a key written twice, a number in quotes, a value
outside its limits and settings that don't fit together are refused before anything starts, each
with the key, the limit and the way out. All problems of a file are listed at once; those that lie
between two keys, when each key by itself is right.

Relative paths start at the folder in which the command runs. **required** marks keys without a
default."""

_ACROSS = """\
## What has to fit together

* `train_batch_size`, where given, is `train_micro_batch_size_per_gpu` x
  `gradient_accumulation_steps` x replicas; a cluster's replicas are its processes (`--num_gpus`)
  over `dsx.pipeline.stages`, which has to divide them.
* `dsx.pipeline.partition`, where it is a list, has one number per stage.
* `dsx.training.schedule.warmup_steps` is at most `dsx.training.steps` (unless that is 0).
* `dsx.outer.delay`, where it is a number, is at most `dsx.outer.local_steps`.
* `dsx.outer.start_clusters` is at least `dsx.outer.min_clusters`.
* `communication_data_type` `"bf16"` needs `bf16.enabled`.
* `wall_clock_breakdown` needs `steps_per_print`; an enabled `comms_logger` has to be `verbose`."""


def reference() -> str:
    """The whole document."""
    parts = [_INTRODUCTION, "## DeepSpeed's keys"]
    parts += [_table(DeepSpeedSettings), *chapters(DeepSpeedSettings)]
    parts += ["## The `dsx` block", _table(DsxSettings), *chapters(DsxSettings, "dsx")]
    parts += [_ACROSS, _refused()]
    return "\n\n".join(parts) + "\n"


def chapters(block: type[Block], path: str = "") -> Iterator[str]:
    """The sections of the blocks inside `block`, which stands at `path`."""
    unions: dict[tuple[type[Block], ...], list[str]] = {}
    for name, field in block.model_fields.items():
        inner = f"{path}.{name}" if path else name
        children = blocks_in(field.annotation)
        if len(children) == 1:
            yield from _chapter(children[0], inner)
        elif all("params" in child.model_fields for child in children):
            yield from (part for child in children for part in _params_chapter(child, inner))
        else:
            unions.setdefault(tuple(children), []).append(f"`{inner}`")
    for members, paths in unions.items():
        yield f"### {', '.join(paths)}"
        yield _variants(members)


def _chapter(block: type[Block], path: str, variant: str = "") -> Iterator[str]:
    yield f"### `{path}`{variant}"
    yield inspect.cleandoc(block.__doc__ or "")
    yield _table(block)
    yield from chapters(block, path)


def _params_chapter(block: type[Block], path: str) -> Iterator[str]:
    """One member of a union whose members differ in `type` and `params` only."""
    (params,) = blocks_in(block.model_fields["params"].annotation)
    return _chapter(params, f"{path}.params", f' of `"type": "{kind_of(block)}"`')


def _variants(blocks: Iterable[type[Block]]) -> str:
    """A table of the members of a union that `type` tells apart."""
    lines = ["| `type` | Meaning | Keys |", "| --- | --- | --- |"]
    for block in blocks:
        keys = [
            f"`{name}` ({_type(field.annotation, field.metadata)}; {_default(field)}): "
            f"{field.description}"
            for name, field in block.model_fields.items()
            if name != "type"
        ]
        text = " ".join(inspect.cleandoc(block.__doc__ or "").split())
        lines.append(f"| `{json.dumps(kind_of(block))}` | {text} | {' '.join(keys)} |")
    return "\n".join(lines)


def _table(block: type[Block]) -> str:
    lines = ["| Key | Value | Default | |", "| --- | --- | --- | --- |"]
    for name, field in block.model_fields.items():
        lines.append(
            f"| `{name}` | {_type(field.annotation, field.metadata)} | {_default(field)} "
            f"| {field.description} |"
        )
    return "\n".join(lines)


_SCALARS = {int: "integer", float: "number", bool: "true, false", str: "text"}
_BOUNDS = (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "to"))


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1:])
    kinds = [kind for block in blocks_in(annotation) if (kind := kind_of(block))]
    if len(kinds) > 1:
        return "block, `type` " + ", ".join(f"`{json.dumps(kind)}`" for kind in kinds)
    if blocks_in(annotation) and origin not in (Union, types.UnionType):
        return "block"
    if origin in (Union, types.UnionType):
        names = ["nothing" if member is type(None) else _type(member) for member in arguments]
        text = " or ".join(name for name in dict.fromkeys(names) if name != "nothing")
    elif origin is Literal:
        text = ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    elif origin in (list, tuple):
        text = f"list of {_type(arguments[0])}"
    elif origin is dict:
        text = "JSON object"
    else:
        text = _SCALARS[annotation]
    return " ".join([text, *_limits(metadata)])


def _limits(metadata: list[Any] | tuple[Any, ...]) -> Iterator[str]:
    for constraint in metadata:
        if isinstance(constraint, FieldInfo):
            yield from _limits(constraint.metadata)
        for attribute, word in _BOUNDS:
            limit = getattr(constraint, attribute, None)
            if limit is not None:
                yield f"{word} {limit:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if field.default_factory is not None:
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Block):
            kind = kind_of(type(default))
            return f"`{json.dumps(kind)}`" if kind else "see below"
        return f"`{json.dumps(default)}`"
    return "unset" if field.default is None else f"`{json.dumps(field.default)}`"


def _refused() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for dotted, reason in refusals(Settings):
        block, _, key = dotted.rpartition(".")
        keys = rows.setdefault((block, reason), [])
        if f"`{key}`" not in keys:
            keys.append(f"`{key}`")
    return "\n".join(
        [
            "## Keys of DeepSpeed that are refused",
            "",
            "| Block | Keys | Why, and the way out |",
            "| --- | --- | --- |",
            *(
                f"| {f'`{block}`' if block else 'top level'} | {', '.join(keys)} | {reason} |"
                for (block, reason), keys in rows.items()
            ),
        ]
    )


def main(path: Path = DOCUMENT) -> None:
    """Write the document to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
