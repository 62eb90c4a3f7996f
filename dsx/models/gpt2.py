"""The anatomy of GPT-2, which publishes no pipeline plan and adds learned positions."""

from torch import nn
from transformers import PreTrainedModel

from dsx.models.anatomy import AddsNothing, Anatomy


def anatomy(lm: PreTrainedModel) -> Anatomy:
    """`wpe` and the embedding's dropout act once, on the first stage."""
    return Anatomy(
        decoder="transformer",
        embedding="wte",
        layers="h",
        first_only={"wpe": AddsNothing, "drop": nn.Identity},
        last_only={"ln_f": nn.Identity},
    )
