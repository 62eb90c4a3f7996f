"""The inner training of one simulated cluster: the real run's, without a pipeline, in fp32."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from dsx.cluster.optimizer import build_optimizer
from dsx.cluster.schedule import learning_rate
from dsx.data.batches import MicroBatch
from dsx.models.config import load_config
from dsx.models.loss import causal_lm_loss
from dsx.models.plan import ModelPlan
from dsx.models.stage import Stage
from dsx.settings.settings import Settings
from dsx.simulation.muon import build_muon

Inner = Literal["settings", "muon"]
"""Which inner optimizer: that of the settings, or Muon with its parameters."""


def build_model(settings: Settings) -> Stage:
    """The unsplit model, fp32 on the CPU, with the initial weights that the real run starts from.

    Raises:
        ModelError: the family or its config can't be used.
        SettingsError: the settings start from pretrained weights.
    """
    model = settings.dsx.model
    plan = ModelPlan(load_config(model))
    (whole,) = plan.partition(1)
    if model.init == "pretrained":
        from dsx.models.pretrained import load_pretrained

        stage = plan.build_stage(whole, None)
        load_pretrained(stage, str(model.path))
        return stage
    return plan.build_stage(whole, settings.dsx.seed)


class InnerTraining:
    """A model with its optimizer, clipping and learning-rate schedule.

    Args:
        settings: the whole file.
        inner: the inner optimizer.
        device: where the model lives.
    """

    def __init__(self, settings: Settings, inner: Inner, device: torch.device) -> None:
        self.model = build_model(settings).to(device)
        self.model.train()
        self.step = 0
        self._settings = settings
        self._device = device
        self._parameters = list(self.model.parameters())
        block = settings.deepspeed_config()["optimizer"]
        if inner == "muon":
            vocab_size = self.model.config.vocab_size
            self._optimizers = build_muon(block, self.model, vocab_size)
        else:
            self._optimizers = [build_optimizer(block, self._parameters, device)]

    def train_step(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """One inner step on the mean loss of equally large micro-batches.

        Returns:
            that loss (scalar, on the device, detached).
        """
        total = torch.zeros((), device=self._device)
        for inputs, labels in batches:
            logits = self.model(inputs.to(self._device))
            loss = causal_lm_loss(logits, labels.to(self._device)) / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.gradient_clipping)
        rate = learning_rate(self.step, self._settings)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return total


@torch.no_grad()
def evaluate(model: Stage, batches: Iterable[MicroBatch]) -> float:
    """Mean held-out loss in nats per token over equally large micro-batches."""
    device = next(model.parameters()).device
    model.eval()
    losses = [
        causal_lm_loss(model(inputs.to(device)), labels.to(device)).item()
        for inputs, labels in batches
    ]
    model.train()
    return sum(losses) / len(losses)
