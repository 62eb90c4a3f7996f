"""The anatomy of OPT, which publishes no pipeline plan: its layers live in `model.decoder`."""

from torch import nn
from transformers import PreTrainedModel

from dsx.models.anatomy import AddsNothing, Anatomy


def _absent() -> nn.Module | None:
    return None


def anatomy(lm: PreTrainedModel) -> Anatomy:
    """Positions are added by the first stage alone; the decoder skips what is None."""
    return Anatomy(
        decoder="model.decoder",
        embedding="embed_tokens",
        layers="layers",
        first_only={"embed_positions": AddsNothing, "project_in": _absent},
        last_only={"final_layer_norm": _absent, "project_out": _absent},
    )
