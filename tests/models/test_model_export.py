"""What dsx exports is what transformers would have saved."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dsx.errors import ModelError
from dsx.models.export import export_hf
from tests.models.tiny_families import (
    FAMILIES,
    batch,
    copy_weights,
    run,
    stages_of,
    tensors_of,
    tiny_config,
    unsplit,
)


def saved(folder: Path) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        merged |= load_file(file)
    return merged


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_equals_save_pretrained(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    reference = unsplit(config)
    reference.save_pretrained(tmp_path / "theirs")
    stages = stages_of(config, 2)
    copy_weights(stages, reference.state_dict())
    export_hf(config, tensors_of(stages), None, tmp_path / "ours", torch.float32)

    theirs, ours = saved(tmp_path / "theirs"), saved(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("config.json", "generation_config.json"):
        texts = [json.loads((tmp_path / who / name).read_text()) for who in ("ours", "theirs")]
        assert texts[0] == texts[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids, _ = batch()
    expected = reference(input_ids=ids, use_cache=False).logits
    assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, expected)
    assert torch.equal(run(stages, ids), expected)


def test_a_bfloat16_export_halves_the_files_and_says_so(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = tensors_of(stages_of(config, 1))
    export_hf(config, tensors, None, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    for name, value in saved(tmp_path / "out").items():
        assert torch.equal(value, tensors[name].bfloat16()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16


class ReadOnce(Mapping[str, Tensor]):
    """Gives every tensor once, as something that reads them from elsewhere would like it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        assert name not in self.read
        self.read.append(name)
        return self.tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_shards_stay_below_their_limit_and_load(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    reference = unsplit(config)
    weights = {n: p.detach() for n, p in reference.named_parameters()}
    tensors = ReadOnce(weights)
    limit = 40_000
    export_hf(config, tensors, None, tmp_path / "out", torch.float32, max_shard_bytes=limit)
    files = list((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert all(sum(v.nbytes for v in load_file(f).values()) <= limit for f in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved(tmp_path / "out").keys()
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in weights.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_the_tokenizer_and_given_generation_settings_come_along(tmp_path: Path) -> None:
    vocabulary = {"<eos>": 0, "a": 1, "b": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")),
        eos_token="<eos>",
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = tiny_config("llama")
    reference = unsplit(config)
    reference.generation_config.max_new_tokens = 17
    reference.save_pretrained(tmp_path / "theirs")
    export_hf(
        config,
        tensors_of(stages_of(config, 1)),
        tmp_path / "tokenizer",
        tmp_path / "out",
        torch.float32,
        generation_from=tmp_path / "theirs",
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == vocabulary
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.max_new_tokens == 17


def test_wrong_tensors_and_used_folders_are_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = tensors_of(stages_of(config, 1))

    def export(changed: dict[str, Tensor], folder: str = "out") -> None:
        export_hf(config, changed, None, tmp_path / folder, torch.float32)

    with pytest.raises(ModelError, match=r"1 are missing \['model\.norm\.weight'\]"):
        export({n: t for n, t in tensors.items() if n != "model.norm.weight"})
    with pytest.raises(ModelError, match=r"not the model's \['surplus'\]"):
        export(tensors | {"surplus": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight'.*\(31,\) should be \(32,\)"):
        export(tensors | {"model.norm.weight": torch.zeros(31)})
    with pytest.raises(ModelError, match=r"no tokenizer can be read from '.*nowhere'"):
        export_hf(config, tensors, tmp_path / "nowhere", tmp_path / "out", torch.float32)
    assert not list(tmp_path.glob("out*"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").touch()
    with pytest.raises(ModelError, match="used' is not empty"):
        export(tensors, "used")
    with pytest.raises(ModelError, match="used/file' is a file"):
        export(tensors, "used/file")
