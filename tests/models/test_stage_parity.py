"""Split models compute what transformers' unsplit models compute."""

import pytest
import torch

from dsx.models.loss import causal_lm_loss
from tests.models.tiny_families import (
    FAMILIES,
    batch,
    copy_weights,
    gradients,
    relative_difference,
    run,
    stages_of,
    tiny_config,
    unsplit,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_the_unsplit_model(family: str) -> None:
    config = tiny_config(family)
    reference = unsplit(config)
    ids, labels = batch()
    expected = reference(input_ids=ids, use_cache=False).logits
    causal_lm_loss(expected, labels).backward()
    state = reference.state_dict()
    for count in (1, 2, 4):
        stages = stages_of(config, count)
        copy_weights(stages, state)
        logits = run(stages, ids)
        assert relative_difference(logits, expected) < 1e-5
        causal_lm_loss(logits, labels).backward()
        split = gradients(stages)
        assert set(split) == {n for n, _ in reference.named_parameters()}
        for name, parameter in reference.named_parameters():
            assert relative_difference(split[name], parameter.grad) < 1e-5, (count, name)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "qwen2_moe"])
def test_recomputed_layers_give_the_same_gradients(family: str) -> None:
    config = tiny_config(family)
    ids, labels = batch()
    plain, recomputed = (stages_of(config, 2, activation_checkpointing=on) for on in (False, True))
    saved: list[int] = []
    for stages in (plain, recomputed):
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = causal_lm_loss(run(stages, ids), labels)
        saved.append(count)
        loss.backward()
    assert saved[1] < saved[0]
    first, second = gradients(plain), gradients(recomputed)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_bfloat16_stage_keeps_exact_rotary_frequencies() -> None:
    config = tiny_config("llama")
    reference = unsplit(config)
    exact = reference.model.rotary_emb.inv_freq
    stages = stages_of(config, 2)
    copy_weights(stages, reference.state_dict())
    for stage in stages:
        pipeline = torch.nn.Sequential(stage)
        pipeline.bfloat16()
        for name, buffer in stage.named_buffers():
            if "inv_freq" in name:
                assert torch.equal(buffer, exact)
        assert {p.dtype for p in stage.parameters()} == {torch.bfloat16}
    reference = reference.bfloat16()
    assert not torch.equal(reference.model.rotary_emb.inv_freq.float(), exact)
    reference.model.rotary_emb.inv_freq = exact
    ids, _ = batch()
    assert torch.equal(run(stages, ids), reference(input_ids=ids, use_cache=False).logits)


def test_the_loss_is_the_fp32_mean_of_all_positions() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 5).bfloat16(), torch.randint(0, 5, (2, 3))
    chosen = logits.float().log_softmax(-1).gather(-1, labels[..., None])
    loss = causal_lm_loss(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, -chosen.mean())
