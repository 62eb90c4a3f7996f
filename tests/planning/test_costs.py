"""Counts, operations and bytes are those of the real code: models, codecs, rounds."""

import threading
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsx.exchange.in_process import InProcessHub
from dsx.models.plan import ModelPlan
from dsx.outer.averaging import Averager
from dsx.planning.costs import ModelCosts
from dsx.planning.exchange import round_traffic
from dsx.planning.memory import in_flight
from dsx.planning.trace import trace
from dsx.settings.codec_block import CompressionSettings
from tests.models.tiny_families import tiny_config

FAMILIES = ("llama", "qwen2", "gemma3_text", "gpt2", "opt", "olmo2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_stages_hold_every_parameter_of_the_real_model(family: str, stages: int) -> None:
    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = ModelPlan(config)
    costs = ModelCosts(plan, 8, torch.float32)
    ranges = plan.partition(stages)

    total = sum(parameter.numel() for parameter in model.parameters())
    copies = plan.parameter_shapes[plan.tied_name].numel() if plan.tied_name else 0
    assert plan.parameter_counts().total == total
    assert sum(map(costs.parameters, ranges)) == total + copies * (stages > 1)
    shapes = [plan.stage_shapes(stage) for stage in ranges]
    names = [name for own in shapes for name in own]
    assert len(names) == len(set(names)), "what is exchanged is exchanged once"
    assert sum(shape.numel() for own in shapes for shape in own.values()) == total


def test_a_traced_layer_has_the_operations_and_bytes_of_the_textbook() -> None:
    """6 operations per weight and token, and arXiv 2205.05198's activations for a GPT layer."""
    hidden, heads, length = 256, 4, 512
    sizes = {"n_embd": hidden, "n_head": heads, "n_layer": 3, "n_positions": length}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    plan = ModelPlan(AutoConfig.for_model("gpt2", **sizes, **dropout))
    (_, stage, _) = plan.partition(3, "uniform")
    cost = trace(plan, stage, 1, length, torch.bfloat16, False)

    weights = 12 * hidden**2
    attention = 4 * length**2 * hidden
    assert cost.forward_flops == 2 * weights * length + attention
    assert cost.backward_flops == pytest.approx(2 * cost.forward_flops, rel=0.1)
    # 34 bytes an entry there, 3 of them masks of dropout, which is off here. The fused attention
    # keeps no square, and transformers' own GELU keeps each of its steps.
    assert 31 <= cost.kept_bytes / (length * hidden) <= 70

    again = trace(plan, stage, 1, length, torch.bfloat16, True)
    assert again.kept_bytes < 0.15 * cost.kept_bytes
    # Nearly the whole forward pass again; its last product is not needed.
    assert 2.5 <= again.backward_flops / cost.forward_flops <= 3.1


def test_a_stage_is_the_sum_of_its_parts() -> None:
    plan = ModelPlan(
        tiny_config(
            "llama",
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=16,
            num_key_value_heads=16,
        )
    )
    costs = ModelCosts(plan, 64, torch.bfloat16)
    for checkpointing in (False, True):
        for stage in plan.partition(2):
            whole = trace(plan, stage, 2, 64, torch.bfloat16, checkpointing)
            added = costs.stage(stage, 2, checkpointing)
            assert added.forward_flops == whole.forward_flops
            # What layers share (rotary tables) is counted with each of them.
            assert 0.98 * whole.kept_bytes <= added.kept_bytes <= 1.2 * whole.kept_bytes
            peak = added.kept_bytes + added.working_bytes
            assert 0.9 * whole.peak_bytes <= peak <= 1.35 * whole.peak_bytes


def test_the_first_stage_holds_most_micro_batches_in_flight() -> None:
    assert [in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(0, 4, 2) == 2


@pytest.mark.parametrize("averaging", ["gather", "scatter"])
@pytest.mark.parametrize("clusters", [2, 4])
@pytest.mark.parametrize(
    "codec",
    [
        "none",
        "int4",
        {"type": "topk", "fraction": 0.1, "values": "sign"},
        {"type": "lowrank", "rank": 4},
    ],
    ids=str,
)
def test_the_bytes_of_a_round_are_what_a_round_sends(
    codec: Any, clusters: int, averaging: str
) -> None:
    plan = ModelPlan(tiny_config("llama", hidden_size=64, intermediate_size=96))
    settings = CompressionSettings.model_validate(
        {"matrices": codec, "embeddings": codec, "vectors": "bf16", "averaging": averaging}
    )
    stages = [plan.stage_shapes(stage) for stage in plan.partition(2)]
    sent = sum(_sent(shapes, settings, plan.vocab_size, clusters) for shapes in stages)

    traffic = round_traffic(stages, 1, settings, plan.vocab_size, clusters)
    # Low rank's note on which rows are zero is a byte where none is, and a bitmap otherwise. Else
    # an average cluster's bytes are rounded up, once a stage.
    notes = 0.03 * sent if isinstance(codec, dict) and codec["type"] == "lowrank" else len(stages)
    assert sent / clusters <= traffic.payload <= sent / clusters + notes


def _sent(
    shapes: dict[str, torch.Size], settings: CompressionSettings, vocabulary: int, clusters: int
) -> int:
    """By all clusters, in one averaging of the outer engine."""
    names = [f"c{index}" for index in range(clusters)]
    hub = InProcessHub(names)

    def one(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        delta = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
        exchange = hub.exchange(names[index])
        averager = Averager(settings, shapes, 0, vocabulary)
        shares = [1 / clusters] * clusters
        averager.average(exchange, exchange.join(60.0), shares, delta, 0)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(clusters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return sum(hub.exchange(name).traffic.sent for name in names)
