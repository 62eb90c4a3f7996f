"""Before training: does the split model compute what the unsplit one does?"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dsx.errors import ModelError
from dsx.models.loss import causal_lm_loss
from dsx.models.plan import ModelPlan
from dsx.models.shrink import TOKENS, shrink
from dsx.models.stage import Stage

TOLERANCE = 1e-5
"""Largest difference of fp32 logits and gradients over the largest value of the tensor."""
LOGITS = 20.0
"""Spread of the logits, so large that a soft cap that is lost between stages shows."""


def self_check(config: PretrainedConfig) -> None:
    """Runs a shrunken model of `config` unsplit and with one layer per stage, and compares.

    Raises ModelError naming the family if logits or gradients differ, if the family can't be
    split at all, or if no small model of it can be built to find out.
    """
    family = config.model_type
    shares = _shared_layers(config)
    if shares:
        raise ModelError(
            f"the family {family!r} can't be split: its layers share keys and values "
            f"({shares}), only hidden states cross a stage; use another model_type"
        )
    try:
        small = shrink(config)
    except ModelError:
        raise
    except Exception as error:
        raise _unverified(family, error) from error
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(0)
        reference = _reference(small)
        ids, labels = torch.randint(3, small.vocab_size, (2, 2, TOKENS))
        try:
            expected = reference(input_ids=ids, use_cache=False).logits
            causal_lm_loss(expected, labels).backward()
        except Exception as error:
            raise _unverified(family, error) from error
        _compare(small, reference, ids, labels, expected.detach())
    finally:
        torch.set_rng_state(state)


def _shared_layers(config: PretrainedConfig) -> str:
    found = [
        f"{name}={value}"
        for name, value in vars(config).items()
        if "shared_layers" in name or "kv_shar" in name
        if value
    ]
    return ", ".join(found)


def _reference(small: PretrainedConfig) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
    except Exception as error:
        raise _unverified(small.model_type, error) from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        head = model.get_output_embeddings().weight
        head.normal_(0.0, LOGITS / head.shape[1] ** 0.5)
    return model


def _unverified(family: str, error: Exception) -> ModelError:
    return ModelError(
        f"no small model of the family {family!r} runs, so whether it can be split is not known: "
        f"{type(error).__name__}: {error}; use another model_type"
    )


def _compare(
    small: PretrainedConfig,
    reference: PreTrainedModel,
    ids: Tensor,
    labels: Tensor,
    expected: Tensor,
) -> None:
    family = small.model_type
    plan = ModelPlan(small)
    stages = [
        plan.build_stage(r, seed=None).eval() for r in plan.partition(plan.layer_count, "uniform")
    ]
    _copy(stages, reference.state_dict())
    try:
        logits = ids
        for stage in stages:
            logits = stage(logits)
        causal_lm_loss(logits, labels).backward()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the family {family!r} can't be split, a part of it fails alone: "
            f"{type(error).__name__}: {error}; use another model_type"
        ) from error
    _require_equal(family, "logits", logits.detach(), expected)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for own, hf in stage.hf_names.items():
            gradient = stage.get_parameter(own).grad
            if gradient is not None:
                gradients[hf] = gradients[hf] + gradient if hf in gradients else gradient
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            found = gradients.get(name, torch.zeros_like(parameter))
            _require_equal(family, f"the gradient of {name}", found, parameter.grad)


def _copy(stages: list[Stage], state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for stage in stages:
            own = dict(stage.named_parameters()) | dict(stage.named_buffers())
            for name, hf in (stage.hf_names | stage.hf_buffer_names).items():
                own[name].copy_(state[hf])


def _require_equal(family: str, what: str, found: Tensor, expected: Tensor) -> None:
    largest = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise ModelError(
            f"the family {family!r} can't be split: in a small model {what} differ by "
            f"{difference:.3g} (largest value {largest:.3g}, allowed {TOLERANCE:g} of it); use "
            "another model_type"
        )
