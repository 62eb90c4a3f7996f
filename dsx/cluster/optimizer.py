"""The inner optimizer, built from the settings' `optimizer` block as DeepSpeed's users know it.

Always torch's own implementation: its state is what checkpoints hold, and DeepSpeed's fused CPU
and CUDA optimizers need a compiler at run time. `fused=True` gives the same single pass.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dsx.errors import SettingsError

# Devices for which torch has fused kernels of all three optimizers.
_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def build_optimizer(
    block: Mapping[str, Any], parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over all `parameters` in one group.

    `block` is DeepSpeed's {"type": ..., "params": {...}}. As in DeepSpeed, "Adam" decouples the
    weight decay (is AdamW) unless `"adam_w_mode": false`. Raises SettingsError for another type or
    for parameters that the optimizer does not have.
    """
    kind = str(block["type"]).lower()
    params = dict(block.get("params", {}))
    if not params.pop("torch_adam", True):
        raise SettingsError(
            "optimizer.params.torch_adam is false, but there is only torch's Adam here; leave the "
            "key out"
        )
    decoupled = params.pop("adam_w_mode", True)
    if kind == "adamw" or (kind == "adam" and decoupled):
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    elif kind == "adam":
        optimizer = torch.optim.Adam
    elif kind == "sgd":
        optimizer = torch.optim.SGD
    else:
        raise SettingsError(f"optimizer.type is {block['type']!r}; use AdamW, Adam or SGD")
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    params.setdefault("fused", device.type in _FUSED_DEVICES)
    try:
        return optimizer(parameters, **params)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"optimizer.params does not fit torch.optim.{optimizer.__name__}: {error}"
        ) from error
