"""Writes a model in the format of transformers' `save_pretrained`, without holding it in memory."""

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from dsx.errors import ModelError
from dsx.models.plan import ModelPlan
from dsx.models.skeleton import build_skeleton


def export_hf(
    config: PretrainedConfig,
    tensors: Mapping[str, Tensor],
    tokenizer_folder: str | Path | None,
    output: str | Path,
    dtype: torch.dtype,
    *,
    generation_from: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes the folder `output`, which `AutoModelForCausalLM.from_pretrained` loads.

    `output` appears only once it is complete.

    Args:
        config: the unsplit model's config.
        tensors: exactly the names of `ModelPlan.parameter_shapes` and `buffer_shapes`; each is
            read once, and at most one shard and one layer of them are held at a time.
        tokenizer_folder: an HF tokenizer to put beside the weights, or None.
        output: must not exist or be empty.
        dtype: of the floating-point weights that are written.
        generation_from: a checkpoint (folder or hub name) whose generation settings are kept;
            None derives them from the config.
        max_shard_bytes: largest weight file; a single larger tensor gets a file of its own.

    Raises ModelError if names or shapes are not the model's, or `output` is in use.
    """
    output = Path(output)
    _require_unused(output)
    plan = ModelPlan(config)
    expected = plan.parameter_shapes | plan.buffer_shapes
    _require_names(set(expected), set(tensors))
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        skeleton = build_skeleton(config)
        _write_configs(skeleton.lm, partial, dtype, generation_from)
        if tokenizer_folder is not None:
            _copy_tokenizer(tokenizer_folder, partial)
        units: dict[str | int | None, list[str]] = {}
        for name in expected:
            units.setdefault(skeleton.anatomy.owner(name), []).append(name)
        _write_shards(
            _converted(skeleton.lm, units, tensors, expected, dtype),
            partial,
            max_shard_bytes,
            sum(shape.numel() for shape in plan.parameter_shapes.values()),
        )
    except BaseException:
        # As large as the model, and of no use.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if output.exists():
        output.rmdir()
    partial.rename(output)


def _require_unused(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists():
        what = "not empty" if output.is_dir() else "a file"
        raise ModelError(f"the export folder {str(output)!r} is {what}; remove it or use another")


def _require_names(expected: set[str], given: set[str]) -> None:
    missing, unknown = sorted(expected - given), sorted(given - expected)
    if missing or unknown:
        raise ModelError(
            f"can't export: of the model's {len(expected)} tensors {len(missing)} are missing "
            f"{missing[:5]}, and {len(unknown)} are not the model's {unknown[:5]}; export with the "
            "config that the run was trained with"
        )


def _write_configs(
    lm: PreTrainedModel, folder: Path, dtype: torch.dtype, generation_from: str | Path | None
) -> None:
    config = copy.deepcopy(lm.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(lm).__name__]
    config.save_pretrained(str(folder))
    generation = lm.generation_config
    if generation_from is not None:
        generation = GenerationConfig.from_pretrained(str(generation_from))
    generation.save_pretrained(str(folder))


def _copy_tokenizer(source: str | Path, folder: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except Exception as error:
        raise ModelError(
            f"no tokenizer can be read from {str(source)!r}: {error}; give the folder of an HF "
            "tokenizer"
        ) from error
    tokenizer.save_pretrained(str(folder))


def _converted(
    lm: PreTrainedModel,
    units: Mapping[str | int | None, list[str]],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as checkpoints hold it, layer by layer: of `dtype`, in the library's layout."""
    for names in units.values():
        unit: dict[str, Tensor] = {}
        for name in names:
            value = tensors[name].detach()
            if value.shape != shapes[name]:
                raise ModelError(
                    f"can't export {name!r}: its shape {tuple(value.shape)} should be "
                    f"{tuple(shapes[name])}; export with the config that the run was trained with"
                )
            unit[name] = value.to("cpu", dtype if value.is_floating_point() else None)
        yield from revert_weight_conversion(lm, unit).items()


def _write_shards(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, max_bytes: int, parameters: int
) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    sizes: list[int] = []

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, value in tensors:
        if shard and sum(v.nbytes for v in shard.values()) + value.nbytes > max_bytes:
            flush()
        # A view into a stack of experts would drag the whole stack along.
        shard[name] = value.clone(memory_format=torch.contiguous_format)
        sizes.append(value.nbytes)
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SAFE_WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": sum(sizes)},
        "weight_map": weight_map,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
