"""The check that refuses a family rather than training a wrongly split model."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from dsx.errors import ModelError
from dsx.models import build
from dsx.models import self_check as module
from dsx.models.plan import ModelPlan
from dsx.models.self_check import self_check
from dsx.models.shrink import shrink
from tests.models.tiny_families import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_families_pass(family: str) -> None:
    self_check(tiny_config(family))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "opt", "gpt2", "mixtral"])
def test_full_size_configs_pass(family: str) -> None:
    self_check(AutoConfig.for_model(family))


def test_a_large_llama_is_checked_in_seconds() -> None:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    began = time.process_time()
    self_check(config)
    assert time.process_time() - began < 3


def test_global_random_state_and_config_stay_as_they_were() -> None:
    config = tiny_config("llama")
    before, text = torch.get_rng_state(), config.to_json_string()
    self_check(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert config.to_json_string() == text


def test_a_shrunken_model_keeps_every_kind_of_layer() -> None:
    gemma = shrink(AutoConfig.for_model("gemma3_text"))
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"}
    assert len(gemma.layer_types) == gemma.num_hidden_layers == 6
    dense_first = AutoConfig.for_model("deepseek_v3")
    assert dense_first.first_k_dense_replace == 3
    assert shrink(dense_first).num_hidden_layers == 4
    heads = shrink(AutoConfig.for_model("qwen2", num_attention_heads=32, num_key_value_heads=8))
    assert heads.num_attention_heads // heads.num_key_value_heads == 4
    for family in ("llama", "mixtral", "gpt2"):
        small = ModelPlan(shrink(AutoConfig.for_model(family)))
        assert small.parameter_counts().total < 2e7


def _lists_not_cut(patch: pytest.MonkeyPatch) -> None:
    original = build._cut_config

    def cut(config: PretrainedConfig, stage_range: Any, total: int) -> PretrainedConfig:
        whole = original(config, stage_range, total)
        whole.layer_types = config.layer_types
        return whole

    patch.setattr(build, "_cut_config", cut)


def _change_stages(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        original = module.ModelPlan.build_stage

        def build_stage(self: ModelPlan, stage: Any, **kwargs: Any) -> Any:
            built = original(self, stage, **kwargs)
            change(built)
            return built

        patch.setattr(module.ModelPlan, "build_stage", build_stage)

    return apply


def _no_soft_cap(stage: Any) -> None:
    stage.config.final_logit_softcapping = None


def _scaled_again(stage: Any) -> None:
    if not stage.stage_range.is_first:
        stage.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


def _detached(stage: Any) -> None:
    if stage.stage_range.is_last:
        stage.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))


def _tie_forgotten(stage: Any) -> None:
    if stage.stage_range.is_last:
        stage.tied_weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "fault", "said"),
    [
        ("gemma3_text", _lists_not_cut, "logits"),
        ("gemma2", _change_stages(_no_soft_cap), "logits"),
        ("gemma", _change_stages(_scaled_again), "logits"),
        ("llama", _change_stages(_detached), "the gradient of model.embed_tokens.weight"),
        ("gpt2", _change_stages(_tie_forgotten), "the gradient of transformer.wte.weight"),
    ],
)
def test_a_wrong_split_is_refused_with_the_familys_name(
    family: str, fault: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(ModelError, match=f"'{family}' can't be split.*{said}"):
        self_check(tiny_config(family))


def test_layers_that_share_keys_and_values_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'gemma3n_text'.*num_kv_shared_layers=15"):
        self_check(AutoConfig.for_model("gemma3n_text"))


def test_a_family_whose_small_model_does_not_run_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'deepseek_v2'.*is not known"):
        self_check(AutoConfig.for_model("deepseek_v2", num_experts_per_tok=None))
