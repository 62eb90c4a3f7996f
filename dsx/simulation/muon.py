"""Muon inside: the inner optimizer of MuLoCo (arXiv 2505.23725), for comparison with AdamW."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dsx.errors import SettingsError

_MOMENTUM = 0.95


def build_muon(block: Mapping[str, Any], model: nn.Module, vocab_size: int) -> list[Any]:
    """Muon for the matrices between embedding and output layer, AdamW for everything else.

    Both take the settings' AdamW parameters: Muon's update is scaled to the root mean square of
    AdamW's (arXiv 2502.16982), so that one learning rate serves both; its momentum is 0.95.

    Returns:
        the two optimizers.

    Raises:
        SettingsError: the settings ask for another optimizer than AdamW.
    """
    if block["type"] != "AdamW":
        raise SettingsError(
            f"optimizer.type is {block['type']!r}, but Muon takes its learning rate from AdamW's "
            'parameters; set it to "AdamW"'
        )
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        inside = id(parameter) not in embeddings and vocab_size not in parameter.shape
        (matrices if inside and parameter.ndim == 2 else others).append(parameter)
    params = dict(block["params"])
    adamw = torch.optim.AdamW(
        others,
        lr=params["lr"],
        betas=tuple(params["betas"]),
        eps=params["eps"],
        weight_decay=params["weight_decay"],
        fused=True,
    )
    muon = torch.optim.Muon(
        matrices,
        lr=params["lr"],
        weight_decay=params["weight_decay"],
        momentum=_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adamw, muon]
