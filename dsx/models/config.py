"""The HF config that the settings ask for."""

import copy
import difflib
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dsx.errors import ModelError
from dsx.hub import hub_is_reachable, where_names_are_looked_up
from dsx.settings.dsx_block import ModelSettings

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(model: ModelSettings) -> PretrainedConfig:
    """Reads `dsx.model`: the config given as JSON, or the one at a folder or hub name.

    Raises ModelError for an unknown model_type or key (naming the nearest known one), values that
    transformers refuses, and a path without a config.
    """
    if model.config is not None:
        return _from_json(model.config)
    assert model.path is not None
    is_folder = Path(model.path).is_dir()
    offline = not is_folder and not hub_is_reachable()
    try:
        return AutoConfig.from_pretrained(model.path)
    except Exception as error:
        where = f": {error}"
        if offline:
            where = f": it is no folder, and not {where_names_are_looked_up()}"
        raise ModelError(
            f"no model config can be read from dsx.model.path {model.path!r}{where}; give a "
            "folder with config.json or the name of a model on the hub"
        ) from error


def config_from_dict(values: dict[str, Any]) -> PretrainedConfig:
    """The config that `PretrainedConfig.to_dict` gave, perhaps through JSON."""
    kind = CONFIG_MAPPING[values["model_type"]]
    config: PretrainedConfig = kind.from_dict(copy.deepcopy(values))
    return config


def _from_json(given: dict[str, Any]) -> PretrainedConfig:
    values = dict(given)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"dsx.model.config.model_type {model_type!r} is not known to transformers"
            + _nearest(model_type, list(CONFIG_MAPPING))
        )
    values = _foreign_tokens(model_type, values) | values
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise ModelError(
            f"transformers refuses dsx.model.config for {model_type!r}: {error}"
        ) from error
    known = {*type(config).__dataclass_fields__, *config.attribute_map}
    for key in values:
        # The library keeps a key that means nothing to it as a plain attribute.
        if key not in known and key in vars(config):
            raise ModelError(
                f"dsx.model.config has an unknown key {key!r} for model_type {model_type!r}"
                + _nearest(key, sorted(known))
            )
    return config


def _foreign_tokens(model_type: str, values: dict[str, Any]) -> dict[str, None]:
    """None for the family's own special tokens where they lie outside the vocabulary asked for:
    they belong to another tokenizer, and transformers warns of each."""
    fields = CONFIG_MAPPING[model_type].__dataclass_fields__
    rows = values.get("vocab_size")
    defaults = {name: fields[name].default for name in _TOKENS if name in fields}
    return {
        name: None
        for name, token in defaults.items()
        if isinstance(rows, int) and isinstance(token, int) and token >= rows
    }


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; remove or correct it"
