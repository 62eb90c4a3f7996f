"""Tiny configs of the model families that dsx must split, with what makes each one special on."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dsx.models.plan import ModelPlan
from dsx.models.stage import Stage

VOCAB = 64

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    "phi3": {},
    "gpt_neox": {},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family not in ("gpt2", "opt"):
        values |= {"intermediate_size": 48, "num_key_value_heads": 2}
    if family == "gpt_neox":
        del values["num_key_value_heads"]
    return AutoConfig.for_model(family, **(values | FAMILIES[family] | changes))


def unsplit(config: PretrainedConfig, noise: float = 0.05) -> PreTrainedModel:
    """transformers' own model with weights in which no bias is zero and no norm is one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = [b for n, b in model.named_buffers() if n in model.state_dict()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            tensor.add_(torch.randn_like(tensor) * noise)
    return model


def tensors_of(stages: list[Stage]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by HF name, as an export needs them."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        own = dict(stage.named_parameters()) | dict(stage.named_buffers())
        names = stage.hf_names | stage.hf_buffer_names
        found |= {hf: own[name] for name, hf in names.items()}
    return found


def stages_of(config: PretrainedConfig, count: int, **build: Any) -> list[Stage]:
    plan = ModelPlan(config)
    return [plan.build_stage(r, **({"seed": 0} | build)) for r in plan.partition(count, "uniform")]


def copy_weights(stages: list[Stage], state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for stage in stages:
            for name, tensor in tensors_of([stage]).items():
                tensor.copy_(state[name])


def run(stages: list[Stage], ids: Tensor) -> Tensor:
    hidden = ids
    for stage in stages:
        hidden = stage(hidden)
    return hidden


def gradients(stages: list[Stage]) -> dict[str, Tensor]:
    """By HF name; both copies of a tied matrix are summed, as the pipeline does."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for own, hf in stage.hf_names.items():
            gradient = stage.get_parameter(own).grad
            assert gradient is not None, hf
            total[hf] = total[hf] + gradient if hf in total else gradient.clone()
    return total


def relative_difference(value: Tensor, reference: Tensor) -> float:
    scale = reference.abs().max().item()
    return (value - reference).abs().max().item() / (scale or 1.0)


def batch(rows: int = 2, length: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
