"""What is decided when a round is committed, by all clusters alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsx.outer.agreement import Agreement
from dsx.outer.rank_control import build_rank_rule
from dsx.outer.state import Progress
from dsx.outer.steps_control import balanced_steps, build_steps_rule, next_paces
from dsx.settings.codec_block import LowRankCodec
from dsx.settings.dsx_block import OuterSettings


@dataclass(frozen=True)
class Observed:
    """What all clusters know of a round that was committed, from its headers."""

    exchange_seconds: float
    """Of the slowest exchange of the round before; 0 when there was none."""
    step_seconds: float
    """Of the fastest cluster; 0 when not measured."""
    ranks: Sequence[float]
    """What the contributors' rank rules measured, in member order."""
    paces: Mapping[str, float]
    """Seconds of an inner step, by contributor."""
    step: int
    """Inner step of the run at the round's end."""


class Control:
    """The rules of `outer.adapt`. All their state is in `Progress`, none in here.

    A decision that is taken when round t is committed holds from round t + 2 on: round t + 1 may be
    under way by then, on some clusters or on all.
    """

    def __init__(self, settings: OuterSettings, vocab_size: int | None) -> None:
        self._settings = settings
        self.steps_rule = build_steps_rule(settings)
        self._prepared = False
        self.rank_rule = build_rank_rule(settings, vocab_size)

    @property
    def changes_rank(self) -> bool:
        return self.rank_rule.measures != "nothing"

    def prepare(
        self, progress: Progress, shapes: Mapping[str, torch.Size], agreement: Agreement
    ) -> None:
        """Before anything is decided, and whenever a state was brought back: `progress` becomes
        one that these rules allow. Collective over the cluster.

        Args:
            shapes: of this rank's tensors.

        Raises:
            SettingsError: as `RankRule.prepare`.
        """
        if not self._prepared:
            self.rank_rule.prepare(shapes, agreement)
            self._prepared = True
        self._conform(progress)

    def _conform(self, progress: Progress) -> None:
        """Bring a new state, or one from a run with other settings, to what these allow."""
        if progress.local_steps == 0:
            progress.local_steps = progress.next_local_steps = self._settings.local_steps
            progress.rank = progress.next_rank = self._first_rank()
        steps, rank = self.steps_rule.clamp, self.rank_rule.clamp
        progress.local_steps = steps(progress.local_steps)
        progress.next_local_steps = steps(progress.next_local_steps)
        progress.rank, progress.next_rank = rank(progress.rank), rank(progress.next_rank)

    def decide(self, progress: Progress, observed: Observed) -> None:
        """Round `progress.round` was committed: change the scalars for the rounds to come."""
        progress.steps = max(progress.steps, observed.step)
        progress.local_steps, progress.rank = progress.next_local_steps, progress.next_rank
        progress.exchange_seconds = max(observed.exchange_seconds, 0.8 * progress.exchange_seconds)
        progress.paces = next_paces(progress.paces, observed.paces)
        # The steps may follow the rank.
        progress.next_rank = self.rank_rule.next_rank(progress, observed.ranks)
        progress.next_local_steps = self.steps_rule.next_steps(
            progress, observed.exchange_seconds, observed.step_seconds
        )

    def own_steps(self, local_steps: int, progress: Progress, cluster: str) -> int:
        """Inner steps that `cluster` makes of a round of `local_steps`."""
        if not self._settings.adapt.balanced:
            return local_steps
        return balanced_steps(local_steps, progress.paces, cluster)

    def _first_rank(self) -> int:
        codec = self._settings.compression.matrices
        return codec.rank if isinstance(codec, LowRankCodec) else 0
