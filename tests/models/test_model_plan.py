"""Counting and partitioning without memory."""

import time
import tracemalloc
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig

from dsx.errors import ModelError
from dsx.models.partition import ParameterCounts, split_layers
from dsx.models.plan import ModelPlan
from tests.models.tiny_families import FAMILIES, stages_of, tiny_config, unsplit


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_counts_are_those_of_the_unsplit_model(family: str) -> None:
    config = tiny_config(family)
    reference, plan = unsplit(config), ModelPlan(config)
    expected = {n: p.shape for n, p in reference.named_parameters()}
    assert plan.parameter_shapes == expected
    buffers = reference.state_dict().keys() & {n for n, _ in reference.named_buffers()}
    assert plan.buffer_shapes.keys() == buffers
    assert bool(buffers) == (family == "deepseek_v3")
    counts = plan.parameter_counts()
    assert counts.total == sum(s.numel() for s in expected.values())
    assert plan.layer_count == len(counts.layers) == config.num_hidden_layers
    assert plan.vocab_size == 64
    assert plan.max_positions == (64 if family in ("opt", "gpt2") else None)
    for stage_range, stage in zip(plan.partition(2), stages_of(config, 2), strict=True):
        if (stage_range.start, stage_range.stop) == (
            stage.stage_range.start,
            stage.stage_range.stop,
        ):
            own = sum(counts.layers[stage_range.start : stage_range.stop])
            own += counts.embedding * stage_range.is_first + counts.head * stage_range.is_last
            assert sum(p.numel() for p in stage.parameters()) == own


def test_a_hundred_billion_parameters_are_counted_in_seconds_without_memory() -> None:
    config = AutoConfig.for_model(
        "qwen2",
        hidden_size=8192,
        intermediate_size=49152,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=152064,
    )
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 8192 + 2 * 1024 + 3 * 8192 * 49152 + 2 * 8192
    tracemalloc.start()
    began = time.monotonic()
    plan = ModelPlan(config)
    stages = plan.partition(8)
    seconds = time.monotonic() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.parameter_counts().layers == (layer,) * 80
    assert plan.parameter_counts().total == 80 * layer + 2 * 152064 * 8192 + 8192
    assert [s.stop - s.start for s in stages] == [10] * 8
    assert seconds < 20
    assert peak < 200e6


def counts(*layers: int, embedding: int = 0, head: int = 0, tied: int = 0) -> ParameterCounts:
    return ParameterCounts(embedding, layers, head, tied)


@pytest.mark.parametrize(
    ("model", "stages", "how", "sizes"),
    [
        (counts(1, 1, 1, 1), 1, "parameters", [4]),
        (counts(1, 1, 1, 1), 4, "parameters", [1, 1, 1, 1]),
        (counts(1, 1, 1, 1, embedding=3), 2, "parameters", [1, 3]),
        (counts(1, 1, 1, 1, head=3), 2, "parameters", [3, 1]),
        (counts(5, 1, 1, 1, 5), 3, "parameters", [1, 3, 1]),
        (counts(1, 1, 1, 1, embedding=100), 3, "parameters", [1, 1, 2]),
        (counts(1, 1, 1, 1, 1), 2, "uniform", [3, 2]),
        (counts(1, 1, 1, 1, 1, embedding=9), 3, "uniform", [2, 2, 1]),
        (counts(1, 1, 1, 1, 1), 2, [1, 4], [1, 4]),
    ],
)
def test_layers_are_dealt_out(model: ParameterCounts, stages: int, how, sizes) -> None:
    result = split_layers(model, stages, how)
    assert [s.stop - s.start for s in result] == sizes
    assert result[0].start == 0
    assert result[-1].stop == len(model.layers)
    assert all(a.stop == b.start for a, b in pairwise(result))
    assert [s.is_first for s in result] == [True] + [False] * (stages - 1)
    assert [s.is_last for s in result] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize(
    ("stages", "how", "said"),
    [
        (5, "parameters", ["5 pipeline stages", "4 layers", "1..4"]),
        (0, "uniform", ["0 pipeline stages"]),
        (2, [1, 2], ["[1, 2]", "sum 3", "sum to 4"]),
        (2, [4, 0], ["[4, 0]", "positive"]),
        (3, [2, 2], ["[2, 2]", "3 positive"]),
    ],
)
def test_impossible_partitions_are_refused_with_the_numbers(stages: int, how, said) -> None:
    with pytest.raises(ModelError) as error:
        ModelPlan(tiny_config("llama")).partition(stages, how)
    assert all(part in str(error.value) for part in said), error.value


def test_the_experts_auxiliary_loss_is_refused() -> None:
    with pytest.raises(ModelError, match=r"mixtral.*output_router_logits.*auxiliary loss"):
        ModelPlan(tiny_config("mixtral", output_router_logits=True))


def test_a_family_without_a_plan_or_a_causal_lm_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'bloom' can't be split.*base_model_pp_plan"):
        ModelPlan(AutoConfig.for_model("bloom", hidden_size=16, n_layer=2, n_head=2, vocab_size=8))
    with pytest.raises(ModelError, match="'vit'"):
        ModelPlan(AutoConfig.for_model("vit"))


def test_ids_that_reach_a_later_stage_are_refused() -> None:
    _, last = stages_of(tiny_config("llama"), 2)
    with pytest.raises(ModelError, match="hidden states"):
        last.root(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
