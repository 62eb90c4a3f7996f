"""Where a cluster is among the inner steps of the run."""

from pydantic import BaseModel, ConfigDict


class StepCounter(BaseModel):
    """Counts inner steps.

    The run's steps are those of the fastest cluster. One that makes `own` of a round's `nominal`
    steps passes `nominal / own` of them with each of its own, so that all meet at the boundary with
    the same count; the learning rate and the end of the run follow it.
    """

    model_config = ConfigDict(extra="forbid")

    boundary: int = 0
    """The run's step at the last boundary."""
    in_round: int = 0
    """Own inner steps since then."""
    nominal: int = 1
    """The run's steps of this round (H)."""
    own: int = 1
    """Own inner steps of this round, `nominal` at most."""
    made: int = 0
    """Inner steps since the start of the run; for one that came later, the run's before it came."""

    @property
    def step(self) -> int:
        """The run's steps that lie behind this cluster."""
        return self.boundary + self.in_round * self.nominal // self.own

    @property
    def next_step(self) -> int:
        """`step` after one more inner step."""
        return self.boundary + (self.in_round + 1) * self.nominal // self.own

    @property
    def is_full(self) -> bool:
        """Whether the round is over."""
        return self.in_round >= self.own

    def own_part(self, steps: int) -> int:
        """Own inner steps in the time of so many of the run's, rounded up."""
        return -(-steps * self.own // self.nominal)

    def advance(self) -> None:
        """One inner step was made."""
        self.in_round += 1
        self.made += 1

    def begin_round(self, nominal: int, own: int) -> None:
        """A boundary: from here on a round of `nominal` steps, `own` of them here."""
        self.boundary = self.step
        self.in_round = 0
        self.nominal, self.own = nominal, own

    def catch_up(self, boundary: int) -> None:
        """The others passed `boundary` meanwhile; what was made since the last one stays made."""
        self.boundary = max(self.boundary, boundary)

    def go_to(self, step: int) -> None:
        """Take a place at a boundary of the others; the round is still to be begun."""
        self.boundary = self.made = step
        self.in_round = 0
