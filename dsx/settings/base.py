"""The base of every settings model: typed, frozen, and closed to unknown keys."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A JSON object of the settings file. Each field carries the sentence that documents it.

    Types are strict: `"4"` is no number, `true` is no integer, NaN and infinity are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Keys that are known but can't be used here -> the reason and the way out."""


class FieldError(ValueError):
    """Raised by a validator of a block about one of the block's own fields.

    `field` is the key inside the block (dotted when it lies deeper), `text` says what is wrong,
    what the limit is and how to mend it.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field
        self.text = text
