"""Plain torch: the unsplit transformers model, its optimizer, the same batches on one process."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PretrainedConfig

from dsx.cluster.schedule import learning_rate
from dsx.models.config import load_config
from dsx.models.plan import ModelPlan
from dsx.settings import Settings, parse_settings
from tests.tiny_settings import tiny_settings

SEQUENCES = 8  # of one inner step of the cluster, however it is cut
SEQ_LEN = 16
VOCABULARY = 64


def settings_for(
    stages: int,
    replicas: int,
    accumulation: int,
    *,
    tied: bool = False,
    bf16: bool = False,
    optimizer: dict[str, Any] | None = None,
    clipping: float = 0.3,
    recompute: bool = False,
) -> Settings:
    adamw = {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1},
    }
    changes = {
        "train_micro_batch_size_per_gpu": SEQUENCES // replicas // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "bf16": {"enabled": bf16},
        "dsx": {
            "seed": 5,
            "model": {"config": {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}},
            "pipeline": {"stages": stages, "activation_checkpointing": recompute},
            "data": {"seq_len": SEQ_LEN},
            "training": {
                "steps": 20,
                "schedule": {"type": "cosine", "warmup_steps": 3, "min_ratio": 0.1},
            },
        },
    }
    raw = tiny_settings(Path("nowhere"), "nothing.txt", changes)
    return parse_settings(raw | {"optimizer": optimizer or adamw})


def sequences(step: int) -> torch.Tensor:
    """The cluster's batch of a step: LongTensor (SEQUENCES, SEQ_LEN + 1)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (SEQUENCES, SEQ_LEN + 1), generator=generator)


def split(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def made_up(shapes: dict[str, torch.Size], salt: int, scale: float = 0.1) -> dict[str, Any]:
    """Values that depend on the name alone, with zeros of both signs among them."""
    values = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(salt + sum(name.encode()))
        values[name] = torch.randn(shape, generator=generator) * scale
        values[name].view(-1)[:2] = torch.tensor([0.0, -0.0])
    return values


class PlainTorch:
    """Trains like a cluster should: mean gradient, clipping by the whole norm, lr by formula.

    With bf16: a bf16 model, gradients of micro-batches of `rows` sequences added in fp32, fp32
    masters.
    """

    def __init__(self, settings: Settings, rows: int = SEQUENCES) -> None:
        self.settings, self.rows = settings, rows
        self.bf16 = settings.bf16.enabled
        config: PretrainedConfig = load_config(settings.dsx.model)
        plan = ModelPlan(config)
        (whole,) = plan.partition(1)
        stage = plan.build_stage(whole, settings.dsx.seed)
        self.masters = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.names = {
            name: parameter
            for name, parameter in self.masters.named_parameters()
            if name in plan.parameter_shapes
        }
        assert self.names.keys() == plan.parameter_shapes.keys()
        self.store({hf: stage.get_parameter(own).detach() for own, hf in stage.hf_names.items()})
        self.compute = copy.deepcopy(self.masters).bfloat16() if self.bf16 else self.masters
        for new, old in zip(self.compute.buffers(), self.masters.buffers(), strict=True):
            new.data = old.data.clone()  # `.bfloat16()` rounds rotary tables
        block = settings.optimizer
        params = block.params.model_dump(exclude={"torch_adam", "fused"})
        kind = getattr(torch.optim, block.type)
        self.optimizer = kind(self.masters.parameters(), **params)
        self.step = 0

    @torch.no_grad()
    def store(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self.names[name].copy_(value)

    def fetch(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.names.items()}

    def moments(self, kind: str) -> dict[str, torch.Tensor]:
        return {n: self.optimizer.state[p][kind].clone() for n, p in self.names.items()}

    def store_moments(self, kind: str, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.names.items():
            self.optimizer.state[parameter][kind].copy_(values[name])

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        ids, labels = split(batch)
        logits = self.compute(ids, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def eval_loss(self, batches: list[torch.Tensor]) -> float:
        self._round()
        return sum(self.loss(batch).item() for batch in batches) / len(batches)

    @torch.no_grad()
    def _round(self) -> None:
        if self.bf16:
            pairs = zip(self.compute.parameters(), self.masters.parameters(), strict=True)
            for low, high in pairs:
                low.copy_(high)

    def train_step(self, lr: float | None = None) -> tuple[float, float]:
        """Loss and gradient norm of the next step."""
        self._round()
        batch, total = sequences(self.step), 0.0
        parts = batch.split(self.rows)
        sums = [torch.zeros_like(p) for p in self.masters.parameters()]
        for part in parts:
            loss = self.loss(part) / len(parts)
            gradients = torch.autograd.grad(loss, list(self.compute.parameters()))
            total += loss.item()
            for sum_, gradient in zip(sums, gradients, strict=True):
                sum_ += gradient.float()
        for parameter, sum_ in zip(self.masters.parameters(), sums, strict=True):
            parameter.grad = sum_
        norm = clip_grad_norm_(
            self.masters.parameters(), self.settings.gradient_clipping or math.inf
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.settings) if lr is None else lr
        self.optimizer.step()
        self.step += 1
        return total, float(norm)
