"""What one would write without dsx: a Llama in DeepSpeed's pipeline engine, a spec per layer.

The yardstick of `dsx bench overhead`, so as lean as such a script can be: rotary tables are made
once, and nothing but `train_batch` runs in a step. Only here does DeepSpeed appear outside of
`dsx.cluster`, and transformers outside of `dsx.models`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class _Embed(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(ids)


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, index)
        self._rotary = [LlamaRotaryEmbedding(config)]  # in a list: no part of the module
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._tables is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            rotary = self._rotary[0].to(hidden.device)
            self._tables = rotary(hidden, positions)
        return self.layer(hidden, attention_mask=None, position_embeddings=self._tables)


class _Head(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class _Pipeline(PipelineModule):
    """A PipelineModule cut at given places, so that both sides have the same stages."""

    def __init__(self, bounds: Sequence[int], **arguments: Any) -> None:
        self._bounds = list(bounds)
        super().__init__(**arguments)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class BareEngine:
    """The script's engine. Collective construction, on the process group that is open."""

    def __init__(
        self,
        config: LlamaConfig,
        deepspeed_config: dict[str, Any],
        layers_per_stage: Sequence[int],
        weights: Mapping[str, torch.Tensor],
        build_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        """`weights`: what this rank's stage starts from, by HF name; `build_optimizer` makes the
        same torch optimizer that the other side has.
        """
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"  # transformers' own choice for a whole model
        specs = [
            LayerSpec(_Embed, config),
            *(LayerSpec(_Block, config, i) for i in range(config.num_hidden_layers)),
            LayerSpec(LlamaRMSNorm, config.hidden_size, config.rms_norm_eps),
            LayerSpec(_Head, config),
        ]
        bounds = [0]
        for index, layers in enumerate(layers_per_stage):
            first, last = index == 0, index == len(layers_per_stage) - 1
            bounds.append(bounds[-1] + layers + first + 2 * last)
        stages = len(layers_per_stage)
        replicas = torch.distributed.get_world_size() // stages
        module = _Pipeline(
            bounds,
            layers=specs,
            topology=PipeDataParallelTopology(num_pp=stages, num_dp=replicas),
            loss_fn=_loss,
        )
        for name, parameter in module.named_parameters():
            parameter.data.copy_(weights[_hf_name(name, config.num_hidden_layers)])
        self._engine = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(list(module.parameters())),
            config=deepspeed_config,
        )[0]

    def train_step(self, batches: Iterator[Any]) -> torch.Tensor:
        """One optimizer step; its mean loss."""
        return self._engine.train_batch(batches)


def _hf_name(name: str, layers: int) -> str:
    """`3.layer.mlp.up_proj.weight` -> `model.layers.2.mlp.up_proj.weight`."""
    place, _, rest = name.partition(".")
    index = int(place)
    if index == 0:
        return f"model.{rest}"
    if index <= layers:
        return f"model.layers.{index - 1}.{rest.removeprefix('layer.')}"
    return f"model.norm.{rest}" if index == layers + 1 else rest
