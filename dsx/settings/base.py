"""The base of every settings model: typed, frozen, and closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A JSON object of the settings file. Each field carries the sentence that documents it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)
