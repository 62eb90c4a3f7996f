"""The inner optimizer is the one that the settings name."""

import pytest
import torch
from torch import nn

from dsx.cluster.optimizer import build_optimizer
from dsx.errors import SettingsError

CPU = torch.device("cpu")


def build(type_: str, **params: object) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(3))]
    return build_optimizer({"type": type_, "params": {"lr": 0.1, **params}}, parameters, CPU)


def test_each_name_gives_torchs_optimizer_with_its_parameters() -> None:
    adamw = build("AdamW", betas=[0.8, 0.9], weight_decay=0.3)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["betas"] == (0.8, 0.9)
    assert adamw.defaults["weight_decay"] == 0.3
    assert adamw.defaults["fused"] is True
    sgd = build("SGD", momentum=0.5)
    assert type(sgd) is torch.optim.SGD
    assert sgd.defaults["momentum"] == 0.5


def test_adam_decouples_its_weight_decay_as_deepspeeds_does_unless_told_otherwise() -> None:
    assert type(build("Adam")) is torch.optim.AdamW
    assert type(build("Adam", adam_w_mode=True)) is torch.optim.AdamW
    assert type(build("Adam", adam_w_mode=False)) is torch.optim.Adam


def test_fused_can_be_turned_off() -> None:
    assert build("AdamW", fused=False).defaults["fused"] is False


def test_what_cannot_be_had_is_refused() -> None:
    with pytest.raises(SettingsError, match="'Lion'; use AdamW, Adam or SGD"):
        build("Lion")
    with pytest.raises(SettingsError, match=r"does not fit torch\.optim\.SGD: .*betas"):
        build("SGD", betas=[0.9, 0.99])
    with pytest.raises(SettingsError, match="torch_adam is false"):
        build("AdamW", torch_adam=False)
