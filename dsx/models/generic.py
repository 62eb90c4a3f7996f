"""The anatomy of any family that publishes a pipeline plan (`base_model_pp_plan`)."""

from torch import nn
from transformers import PreTrainedModel

from dsx.errors import ModelError
from dsx.models.anatomy import Anatomy


def anatomy(lm: PreTrainedModel) -> Anatomy:
    """Reads the plan: children of the base model in running order, each with inputs and outputs.

    The child that takes ids is the embedding, the module list holds the layers, what stands
    between them belongs to the first stage and what follows to the last.

    Raises ModelError if the family has no plan or one of another shape.
    """
    family = lm.config.model_type
    plan = lm.config.base_model_pp_plan
    if not plan:
        raise ModelError(
            f"the family {family!r} can't be split: transformers publishes no pipeline plan "
            "(base_model_pp_plan) for it and dsx has no adapter; use another model_type"
        )
    decoder = lm.base_model
    names = list(plan)
    layers = [n for n in names if isinstance(getattr(decoder, n, None), nn.ModuleList)]
    embedding = [n for n in names if plan[n][0] == ["input_ids"]]
    if len(layers) != 1 or embedding != names[:1]:
        raise ModelError(
            f"the family {family!r} can't be split: its pipeline plan {names} is not an "
            "embedding, one list of layers and what follows them; use another model_type"
        )
    position = names.index(layers[0])
    return Anatomy(
        decoder=lm.base_model_prefix,
        embedding=embedding[0],
        layers=layers[0],
        first_only=dict.fromkeys(names[1:position], nn.Identity),
        last_only=dict.fromkeys(names[position + 1 :], nn.Identity),
    )
