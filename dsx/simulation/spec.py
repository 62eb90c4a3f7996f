"""What a simulated run consists of, and the digest under which its result is kept."""

import hashlib
import json
import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsx import __version__
from dsx.errors import SettingsError
from dsx.settings.adapt_block import AdaptSettings, LinkSteps
from dsx.settings.loading import parse_settings
from dsx.settings.settings import Settings
from dsx.simulation.inner import Inner

Kind = Literal["clusters", "allreduce", "single"]
"""Clusters with an outer engine; one model on all clusters' batches; one cluster alone."""

_AUTO_DELAY_SHARE = 5
# What a simulated run's result depends on; the rest is bookkeeping of a real run.
_RELEVANT = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
)
_RELEVANT_BLOCK = ("seed", "model", "training", "outer")


class RunSpec(BaseModel):
    """One run of a sweep, or a baseline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    raw: dict[str, Any]
    """The settings file's JSON with every override applied."""
    clusters: int = Field(ge=1)
    inner: Inner = "settings"
    changed: dict[str, Any] = {}
    """The settings by which the run differs from the file, by full key; for reading only."""

    @property
    def name(self) -> str:
        """The kind of a baseline, or what the run changes; the same for all seeds."""
        changes = " ".join(f"{short_key(key)}={_text(value)}" for key, value in self._told())
        if self.kind == "clusters":
            return changes or "as set"
        return self.kind

    def _told(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self.changed.items() if key != "dsx.seed"]

    @property
    def seed(self) -> int:
        return int(self.raw["dsx"].get("seed", 0))

    def settings(self) -> Settings:
        """The checked settings, with a delay and rounds that need no measurement.

        `auto` is the smallest delay that a measured exchange fits into, in rounds that are long
        enough for it. Here nothing is sent, so it stands for what a run begins with: a fifth of a
        round of `local_steps`.

        Raises:
            SettingsError: also for rules of `outer.adapt` that follow measured times.
        """
        settings = parse_settings(self.raw, source=self.name)
        outer = settings.dsx.outer
        if outer.adapt.balanced or isinstance(outer.adapt.local_steps, LinkSteps):
            key = "balanced" if outer.adapt.balanced else "local_steps"
            raise SettingsError(
                f"dsx.outer.adapt.{key} follows measured times, but simulated clusters all go at "
                'one pace and over no link; leave it out, or use "paper" for local_steps'
            )
        if outer.delay != "auto":
            return settings
        delay = math.ceil(outer.local_steps / _AUTO_DELAY_SHARE)
        raw = {**self.raw, "dsx": {**self.raw["dsx"]}}
        raw["dsx"]["outer"] = {**raw["dsx"].get("outer", {}), "delay": delay}
        return parse_settings(raw, source=self.name)

    def digest(self, data_digest: str) -> str:
        """Equal for equal results: settings that matter for this kind, data, version of dsx."""
        settings = self.settings()
        relevant = settings.model_dump(mode="json", include=set(_RELEVANT))
        block = settings.dsx.model_dump(mode="json", include=set(_RELEVANT_BLOCK))
        if self.kind != "clusters":
            del block["outer"]
        elif settings.dsx.outer.adapt == AdaptSettings():
            # Nothing adapts: results from before there was such a block are still good.
            del block["outer"]["adapt"]
        parts: list[Any] = [__version__, data_digest, settings.dsx.data.seq_len]
        parts += [self.kind, self.clusters, self.inner, relevant, block]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def short_key(key: str) -> str:
    """A full key without the `dsx.` that everything in the block begins with."""
    return key.removeprefix("dsx.")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
