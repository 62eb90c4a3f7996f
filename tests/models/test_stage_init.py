"""Initial weights: the library's scheme, one seed, the same model for every stage count."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dsx.models.plan import ModelPlan
from dsx.models.stage import Stage
from tests.models.tiny_families import FAMILIES, batch, run, stages_of, tiny_config


def weights(stages: list[Stage]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stage in stages:
        for own, hf in stage.hf_names.items():
            value = stage.get_parameter(own).detach()
            assert hf not in found or torch.equal(found[hf], value), hf
            found[hf] = value
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_count_starts_from_the_same_weights(family: str) -> None:
    config = tiny_config(family)
    whole = weights(stages_of(config, 1))
    for count in (2, 4):
        split = weights(stages_of(config, count))
        assert split.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(split[name], value), name


def test_another_seed_is_another_model_and_layers_differ() -> None:
    config = tiny_config("llama")
    first, second = (weights(stages_of(config, 2, seed=s)) for s in (0, 1))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], second[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_spreads_equal_those_of_the_library(family: str) -> None:
    config = tiny_config(family, hidden_size=128) if family != "opt" else tiny_config(family)
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = weights(stages_of(config, 2))
    for name, parameter in reference.named_parameters():
        expected, found = parameter.std(correction=0).item(), ours[name].std(correction=0).item()
        assert found == pytest.approx(expected, rel=0.2, abs=1e-6), name
        if expected == 0:
            assert torch.equal(ours[name], parameter), name


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_equal_those_of_the_library_exactly(family: str) -> None:
    config = tiny_config(family)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    decoder = reference.model.decoder if family == "opt" else reference.base_model
    persistent = decoder.state_dict()
    expected = {n: b for n, b in decoder.named_buffers() if n not in persistent}
    for stage in stages_of(config, 2):
        kept = stage.hf_buffer_names
        prefix = "root." + f"{reference.base_model_prefix}." * stage.stage_range.is_last
        found = {n.removeprefix(prefix): b for n, b in stage.named_buffers() if n not in kept}
        shared = {n for n in expected if n.startswith("rotary")}
        assert set(found) == {n for n in expected if n in shared or stage.stage_range.is_first}
        for name, buffer in found.items():
            assert torch.equal(buffer, expected[name]), name


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    stages_of(tiny_config("gpt2"), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_parameters_are_nan_and_tables_are_ready() -> None:
    for stage in stages_of(tiny_config("llama"), 2, seed=None):
        assert all(p.isnan().all() for p in stage.parameters())
        assert not any(b.isnan().any() for b in stage.buffers())


@pytest.mark.parametrize("tied", [False, True])
def test_first_and_last_stage_hold_a_copy_of_a_tied_matrix(tied: bool) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied)
    plan = ModelPlan(config)
    assert plan.tied is tied
    first, middle, last = stages_of(config, 3)
    assert middle.tied_parameter is None
    if not tied:
        assert first.tied_parameter is None
        assert last.tied_parameter is None
        return
    assert first.tied_weight is first.tied_parameter
    assert torch.equal(first.tied_weight, last.tied_weight)
    assert first.tied_weight is not last.tied_weight
    names = [
        {s.hf_names[n] for n, p in s.named_parameters() if p is s.tied_weight}
        for s in (first, last)
    ]
    assert names == [{plan.tied_name}] * 2
    (whole,) = stages_of(config, 1)
    assert sum(p is whole.tied_weight for p in whole.parameters()) == 1
    run([whole], batch()[0]).sum().backward()
    assert whole.tied_weight.grad is not None
