"""Loads one stage's weights from an HF checkpoint."""

import copy
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from dsx.errors import ModelError
from dsx.models.checkpoint_files import CheckpointFiles
from dsx.models.initialise import require_initialised
from dsx.models.skeleton import build_lm
from dsx.models.stage import Stage


def load_pretrained(stage: Stage, path: str | Path) -> None:
    """Fills `stage` from the checkpoint at `path` (folder or hub name), as fp32.

    Only this stage's tensors are read, from the files that hold them. Names and layouts that
    transformers converts when loading (such as one tensor per expert) are converted by it.

    Raises ModelError naming the tensors if one of this stage is missing or has another shape, if
    the checkpoint holds one that no stage would use and transformers does not ignore, if tied
    matrices differ, or if there are no readable safetensors weights.
    """
    files = CheckpointFiles(path)
    names = _CheckpointNames(build_lm(stage.config))
    sources, unexpected = names.group(files.keys)
    if unexpected:
        raise ModelError(
            f"the checkpoint {files.path!r} holds {len(unexpected)} tensors that "
            f"{stage.config.model_type!r} has no place for: {unexpected[:5]}; use the config that "
            "belongs to it"
        )
    targets = {hf: own for own, hf in (stage.hf_names | stage.hf_buffer_names).items()}
    aliases = names.aliases(targets)
    own = {target: keys for target, keys in sources.items() if aliases.get(target) is not None}
    filled: set[str] = set()
    with torch.no_grad():
        for target, keys in own.items():
            for name, value in names.convert(target, files.read(keys)).items():
                _fill(
                    stage, targets[aliases[name]], value, files.path, again=aliases[name] in filled
                )
                filled.add(aliases[name])
    missing = sorted(set(targets) - filled, key=dot_natural_key)
    if missing:
        raise ModelError(
            f"the checkpoint {files.path!r} lacks {len(missing)} of the {len(targets)} tensors of "
            f"stage {stage.stage_range.index}: {missing[:5]}; use a complete checkpoint"
        )
    require_initialised(stage, stage.config.model_type)


class _CheckpointNames:
    """From names in a checkpoint to names in the model, by transformers' own rules."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self._lm = lm
        self._state = lm.state_dict()
        mapping = get_model_conversion_mapping(lm)
        self._renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._patterns: dict[str, str | None] = {}

    def group(self, keys: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Checkpoint names by the (first) tensor they become, and those that become none."""
        groups: dict[str, list[str]] = {}
        unexpected: list[str] = []
        ignored = self._ignored()
        for key in sorted(keys, key=dot_natural_key):
            target = self._rename(key)
            if target in self._state:
                groups.setdefault(target, []).append(key)
            elif not any(re.search(pattern, target) for pattern in ignored):
                unexpected.append(key)
        return groups, unexpected

    def aliases(self, names: Iterable[str]) -> dict[str, str]:
        """From every name under which the model knows one of `names` to that name."""
        pairs = self._lm.all_tied_weights_keys
        found = {name: name for name in names}
        for dropped, kept in pairs.items():
            if kept in found:
                found[dropped] = kept
        return found

    def convert(self, target: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of the model that `tensors` of the checkpoint become."""
        transform: WeightConverter | WeightRenaming | None = None
        for key, tensor in tensors:
            pattern = self._patterns[key]
            if transform is None:
                transform = (
                    WeightRenaming(key, target)
                    if pattern is None
                    else copy.deepcopy(self._converter(pattern))
                )
            transform.add_tensor(target, key, pattern or key, tensor)
        assert transform is not None
        try:
            result = transform.convert(target, model=self._lm, config=self._lm.config)
        except Exception as error:
            raise ModelError(
                f"transformers can't convert the checkpoint's tensors for {target!r}: {error}; "
                "use the config that belongs to the checkpoint"
            ) from error
        return {n: v[0] if isinstance(v, list) else v for n, v in result.items()}

    def _rename(self, key: str) -> str:
        prefix, state = self._lm.base_model_prefix, self._state
        target, pattern = rename_source_key(key, self._renamings, self._converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        self._patterns[key] = pattern
        return target

    def _converter(self, pattern: str) -> WeightConverter:
        return next(c for c in self._converters if pattern in c.source_patterns)

    def _ignored(self) -> set[str]:
        """What transformers drops from checkpoints on purpose, tables of old versions included."""
        buffers = {name.rpartition(".")[2] for name, _ in self._lm.named_buffers()}
        old = {
            "inv_freq": r"rotary_emb\.inv_freq$",
            "position_ids": r"(^|\.)position_ids$",
        }
        return set(self._lm._keys_to_ignore_on_load_unexpected or ()) | {
            pattern for name, pattern in old.items() if name in buffers
        }


def _fill(stage: Stage, own: str, value: Tensor, path: str, again: bool) -> None:
    holder, _, name = own.rpartition(".")
    mine: Tensor = getattr(stage.get_submodule(holder), name)
    if value.shape != mine.shape:
        raise ModelError(
            f"the checkpoint {path!r} has shape {tuple(value.shape)} for {own!r}, the config says "
            f"{tuple(mine.shape)}; use the config that belongs to it"
        )
    if again and not torch.equal(mine, value.to(mine.dtype)):
        raise ModelError(
            f"the checkpoint {path!r} holds different matrices for the embedding and the output "
            "layer, the config ties them; set tie_word_embeddings to false"
        )
    mine.copy_(value)
