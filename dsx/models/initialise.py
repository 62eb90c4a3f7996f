"""Seeded initial weights that do not depend on how the model is split."""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsx.errors import ModelError


def materialise(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Gives memory to the meta tensors of `modules`, filled with NaN so that none is forgotten.

    Parameters and buffers that these modules hold themselves become CPU tensors in place; a
    parameter that several modules share stays one.

    Returns:
        From the id of each meta tensor to its replacement.
    """
    replaced: dict[int, Tensor] = {}
    for module in modules:
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in holders:
            for name, tensor in own.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in replaced:
                    fill = torch.nan if tensor.is_floating_point() else 0
                    data = torch.full_like(tensor, fill, device="cpu", requires_grad=False)
                    if isinstance(tensor, nn.Parameter):
                        data = nn.Parameter(data, tensor.requires_grad)
                    replaced[id(tensor)] = data
                own[name] = replaced[id(tensor)]
    return replaced


def initialise(
    lm: PreTrainedModel, modules: Iterable[tuple[str, nn.Module]], seed: int | None
) -> None:
    """Initialises `modules` with the library's own scheme, each from a seed of its own.

    The seed of a module derives from `seed` and its path in the unsplit model, so every split of
    the model starts from the same weights. The global random state is left as it was.

    Args:
        lm: the unsplit model (its config decides depth-scaled schemes); not changed otherwise.
        modules: (path, module) pairs, children before their parents.
        seed: None initialises only modules with buffers (rotary tables).
    """
    schemes = {
        path: module._init_weights
        for path, module in lm.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    state = torch.get_rng_state()
    try:
        with torch.no_grad():
            for path, module in modules:
                if seed is None and not module._buffers:
                    continue
                key = f"{seed}/{path}".encode()
                # The CPU generator alone: torch.manual_seed would reseed accelerators as well.
                torch.default_generator.manual_seed(
                    int.from_bytes(hashlib.sha256(key).digest()[:8], "big")
                )
                owner = path
                while owner not in schemes:
                    owner = owner.rpartition(".")[0]
                schemes[owner](module)
    finally:
        torch.set_rng_state(state)


def require_initialised(root: nn.Module, family: str) -> None:
    """Raises ModelError naming a tensor of `root` that no initialisation touched."""
    tensors = [*root.named_parameters(), *root.named_buffers()]
    left = [n for n, t in tensors if t.is_floating_point() and torch.isnan(t).any()]
    if left:
        raise ModelError(
            f"transformers' initialisation of {family!r} leaves {left[:3]} unset; start it from a "
            'checkpoint (dsx.model.init: "pretrained")'
        )
