"""A causal LM on the meta device: every module and name of the model, none of its memory."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dsx.errors import ModelError
from dsx.models import generic, gpt2, opt
from dsx.models.anatomy import Anatomy

ADAPTERS = {"opt": opt.anatomy, "gpt2": gpt2.anatomy}


@dataclass(frozen=True)
class Skeleton:
    """The whole model without memory, and what a pipeline must know of it.

    `names` maps each parameter and persistent buffer, by id, to its name in the checkpoint of the
    unsplit model; of tied names, the one that checkpoints keep. `tied` is that name of the
    embedding matrix if the output layer uses the same one, else None.
    """

    lm: PreTrainedModel
    anatomy: Anatomy
    names: dict[int, str]
    tied: str | None

    @property
    def decoder(self) -> PreTrainedModel:
        """The module whose forward runs the layers."""
        return self.lm.get_submodule(self.anatomy.decoder)

    @property
    def layers(self) -> nn.ModuleList:
        """All layers of the model."""
        return getattr(self.decoder, self.anatomy.layers)


def build_lm(config: PretrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` on the meta device, fp32. `config` is copied, not changed.

    Raises ModelError if the family has no causal LM or the config is inconsistent.
    """
    config = copy.deepcopy(config)
    config.return_dict = True
    config.output_hidden_states = False
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ModelError(
            f"transformers can't build a causal language model from the {config.model_type!r} "
            f"config: {error}; correct dsx.model"
        ) from error


def build_skeleton(config: PretrainedConfig) -> Skeleton:
    """Builds the model on the meta device and finds its parts.

    Raises ModelError naming the family if it can't be dealt out to stages: no plan, weights
    beside the layers, weights shared by layers, an auxiliary loss.
    """
    _refuse_unsupported(config)
    lm = build_lm(config)
    anatomy = ADAPTERS.get(config.model_type, generic.anatomy)(lm)
    names, tied = _name_tensors(lm, anatomy)
    return Skeleton(lm, anatomy, names, tied)


def layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: modules, shapes, switches and names (not their index)."""
    modules = tuple(
        (
            name,
            type(module).__name__,
            tuple(
                (n, v) for n, v in vars(module).items() if isinstance(v, (bool, str, type(None)))
            ),
        )
        for name, module in layer.named_modules()
    )
    return modules, tuple((n, p.shape) for n, p in layer.named_parameters())


def _refuse_unsupported(config: PretrainedConfig) -> None:
    family = config.model_type
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            f"the {family!r} config has output_router_logits=true: the experts' auxiliary loss "
            "can't be carried across pipeline stages; set it to false to train without that loss"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the {family!r} config is quantized, dsx trains fp32 or bf16 weights; use an "
            "unquantized checkpoint"
        )
    if getattr(config, "is_heterogeneous", False):
        raise ModelError(
            f"the {family!r} config overrides settings per layer (per_layer_config), which can't "
            "be split; use a config without it"
        )


def _name_tensors(lm: PreTrainedModel, anatomy: Anatomy) -> tuple[dict[int, str], str | None]:
    family = lm.config.model_type
    dropped = set(lm.all_tied_weights_keys)
    persistent = set(lm.state_dict())
    tensors = list(lm.named_parameters(remove_duplicate=False))
    tensors += [(n, b) for n, b in lm.named_buffers() if n in persistent]
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors:
        aliases.setdefault(id(tensor), []).append(name)
    stray = [n for n, _ in tensors if anatomy.owner(n) is None]
    if stray:
        raise ModelError(
            f"the family {family!r} can't be split: {stray[:3]} lie beside the layers and would "
            "exist on every stage; use another model_type"
        )
    names: dict[int, str] = {}
    tied: str | None = None
    embedding = f"{anatomy.decoder}.{anatomy.embedding}.weight"
    for key, group in aliases.items():
        kept = [n for n in group if n not in dropped]
        names[key] = kept[0] if kept else group[0]
        owners = {anatomy.owner(n) for n in group}
        if owners == {"embedding", "head"} and embedding in group and len(group) == 2:
            tied = names[key]
        elif len(owners) > 1:
            raise ModelError(
                f"the family {family!r} can't be split: {group[:3]} are one matrix on several "
                "layers; use another model_type or, where the config offers it, untie them"
            )
    return names, tied
