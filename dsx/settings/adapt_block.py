"""The `outer.adapt` block: what the run changes on its own while it trains.

A rule is an object with a `type`, or, as shorthand, the type alone: `"paper"`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dsx.settings.base import Block, FieldError


class FixedSteps(Block):
    """`outer.local_steps`, from the first round to the last."""

    type: Literal["fixed"] = "fixed"


class PaperSteps(Block):
    """H_1 r / r_1 (DiLoCoX, arXiv 2506.21263): a smaller rank hides behind a shorter round."""

    type: Literal["paper"] = "paper"


class LinkSteps(Block):
    """The shortest round of which the measured exchange takes at most a set share."""

    type: Literal["link"] = "link"
    share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Largest share of a round's inner steps that the exchange may take; 1 gives "
        "it the whole round, as in the paper.",
    )
    min: int | None = Field(
        None, ge=1, description="Fewest inner steps of a round; null: `outer.local_steps`."
    )
    max: int | None = Field(
        None, ge=1, description="Most inner steps of a round; null: 50 times `outer.local_steps`."
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "LinkSteps":
        if self.min is not None and self.max is not None and self.min > self.max:
            raise FieldError("min", f"is {self.min}, more than `max` ({self.max}); swap them")
        return self

    def clamp(self, local_steps: int) -> int:
        """The nearest number of inner steps inside of the bounds."""
        fewest = max(local_steps, self.min or 1)
        return min(fewest, self.max or fewest)


class FixedRank(Block):
    """The rank that the codec says, from the first round to the last."""

    type: Literal["fixed"] = "fixed"


class PaperRank(Block):
    """The mean, over a window of rounds, of the rank that the averaged pseudo-gradient really has:
    how many singular values hold a share 1 - eps of its energy. It never rises."""

    type: Literal["paper"] = "paper"
    window: int = Field(10, ge=1, description="Rounds over which the rank is averaged.")
    eps: float = Field(
        0.05, gt=0, lt=1, description="Share of the energy that may lie outside of the rank."
    )
    min: int = Field(1, ge=1, description="The rank below which it does not fall.")


class EnergyRank(Block):
    """The smallest rank that keeps a share 1 - eps of what every cluster has to send (the update
    with its error feedback), as far as a budget of bytes allows. It rises and falls."""

    type: Literal["energy"] = "energy"
    eps: float = Field(
        0.2, gt=0, lt=1, description="Share of the energy that may be left to the error feedback."
    )
    budget_bytes: int = Field(
        ..., ge=1, description="Most bytes of one cluster's whole encoded update."
    )


def _expand_shorthand(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


StepsRule = Annotated[
    FixedSteps | PaperSteps | LinkSteps,
    Field(discriminator="type"),
    BeforeValidator(_expand_shorthand),
]
RankRule = Annotated[
    FixedRank | PaperRank | EnergyRank,
    Field(discriminator="type"),
    BeforeValidator(_expand_shorthand),
]


class AdaptSettings(Block):
    """What changes from round to round. All clusters decide alike, from values that they share;
    what is decided when a round ends holds from the round after the next one on."""

    local_steps: StepsRule | None = Field(
        None,
        description="The inner steps of a round (H); null: `link` where `outer.delay` is `auto`, "
        "so that a slow link gets longer rounds than `outer.local_steps`, else `fixed`.",
    )
    rank: RankRule = Field(
        default_factory=FixedRank,
        description="The rank of `compression.matrices`, one for all matrices.",
    )
    balanced: bool = Field(
        False,
        description="A slower cluster does fewer inner steps per round, so that no cluster waits; "
        "the run's steps are those of the fastest.",
    )
