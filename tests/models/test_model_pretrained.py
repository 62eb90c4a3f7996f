"""Stages filled from HF checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsx.errors import ModelError
from dsx.models.checkpoint_files import CheckpointFiles
from dsx.models.pretrained import load_pretrained
from dsx.models.stage import Stage
from tests.models.tiny_families import FAMILIES, batch, run, stages_of, tiny_config, unsplit


def load(stages: list[Stage], folder: Path) -> None:
    for stage in stages:
        load_pretrained(stage, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_a_loaded_checkpoint_give_its_logits(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    reference = unsplit(config)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ids, _ = batch()
    expected = reference(input_ids=ids, use_cache=False).logits
    for count in (1, 2):
        stages = stages_of(config, count, seed=None)
        load(stages, tmp_path)
        assert torch.equal(run(stages, ids), expected)


def test_a_bfloat16_checkpoint_becomes_fp32(tmp_path: Path) -> None:
    config = tiny_config("llama")
    reference = unsplit(config).bfloat16()
    reference.save_pretrained(tmp_path)
    (stage,) = stages_of(config, 1, seed=None)
    load_pretrained(stage, tmp_path)
    state = reference.state_dict()
    for own, hf in stage.hf_names.items():
        assert stage.get_parameter(own).dtype == torch.float32
        assert torch.equal(stage.get_parameter(own), state[hf].float())


def test_only_own_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    unsplit(config).save_pretrained(tmp_path, max_shard_size="10KB")
    read: set[str] = set()
    original = CheckpointFiles.read

    def spy(self: CheckpointFiles, keys: list[str]):
        read.update(keys)
        return original(self, keys)

    monkeypatch.setattr(CheckpointFiles, "read", spy)
    _, second, _ = stages_of(config, 3, seed=None)
    load_pretrained(second, tmp_path)
    assert read == set(second.hf_names.values())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    elsewhere = set(index.values()) - {index[name] for name in read}
    assert elsewhere
    for file in elsewhere:
        (tmp_path / file).unlink()
    load_pretrained(second, tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    unsplit(tiny_config("llama")).save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **tensors: Tensor | None) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, file, metadata={"format": "pt"})


def test_a_missing_tensor_is_named_by_the_stage_that_needs_it(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__3__mlp__up_proj__weight=None)
    first, last = stages_of(tiny_config("llama"), 2, seed=None)
    load_pretrained(first, checkpoint)
    with pytest.raises(ModelError, match=r"lacks 1 of .*model\.layers\.3\.mlp\.up_proj\.weight"):
        load_pretrained(last, checkpoint)


def test_an_unexpected_tensor_is_named_by_every_stage(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__4__mlp__up_proj__weight=torch.zeros(48, 32))
    for stage in stages_of(tiny_config("llama"), 2, seed=None):
        with pytest.raises(ModelError, match=r"no place for: \['model\.layers\.4\.mlp"):
            load_pretrained(stage, checkpoint)


def test_tensors_that_transformers_ignores_are_ignored(checkpoint: Path) -> None:
    edit(checkpoint, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    load(stages_of(tiny_config("llama"), 2, seed=None), checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    edit(checkpoint, model__norm__weight=torch.zeros(31))
    with pytest.raises(ModelError, match=r"\(31,\).*norm\.weight.*\(32,\)"):
        load(stages_of(tiny_config("llama"), 1, seed=None), checkpoint)


@pytest.mark.parametrize("kept", ["both", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_matrix_is_found_under_either_name(kept: str, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if kept not in (name, "both"):
            del state[name]
    matrix = next(state[n] for n in ("lm_head.weight", "model.embed_tokens.weight") if n in state)
    save_file(state, file)
    for count in (1, 2):
        stages = stages_of(tiny_config("llama", tie_word_embeddings=True), count, seed=None)
        load(stages, checkpoint)
        assert torch.equal(stages[0].tied_weight, matrix)
        assert torch.equal(stages[-1].tied_weight, matrix)


def test_tied_matrices_that_differ_are_refused(checkpoint: Path) -> None:
    stages = stages_of(tiny_config("llama", tie_word_embeddings=True), 2, seed=None)
    for stage in stages:
        with pytest.raises(ModelError, match="tie_word_embeddings to false"):
            load_pretrained(stage, checkpoint)


def test_unusable_checkpoints_are_refused_with_the_way_out(checkpoint: Path) -> None:
    (stage,) = stages_of(tiny_config("llama"), 1, seed=None)
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors.*can't be read"):
        load_pretrained(stage, checkpoint)
    file.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_pretrained(stage, checkpoint)
    (checkpoint / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pickled.*save_pretrained"):
        load_pretrained(stage, checkpoint)
    with pytest.raises(ModelError, match="can't be reached"):
        load_pretrained(stage, checkpoint / "elsewhere")


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    config = tiny_config("llama")
    unsplit(config).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(stages_of(config, 1, seed=None), tmp_path)
