"""One place to report to: a tracker hands every event to all sinks."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from dsx.settings.dsx_block import TrackingSettings
from dsx.tracking.events import Event
from dsx.tracking.jsonl import JsonlSink


class Sink(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Fans events out. `Tracker([])` is what ranks that don't report use."""

    def __init__(self, sinks: Sequence[Sink], wandb_location: str | None = None) -> None:
        self._sinks = list(sinks)
        self.wandb_location = wandb_location
        """URL of the wandb run, or the folder of an offline one; None without wandb."""

    @classmethod
    def open(
        cls, run_dir: Path | str, cluster: str, run_name: str, tracking: TrackingSettings
    ) -> "Tracker":
        """The tracker of a cluster's reporting rank: the metrics file, and wandb if wanted.

        Never waits for input, and for the network for seconds only.
        """
        sinks: list[Sink] = [JsonlSink(run_dir, cluster)]
        location = None
        if tracking.wandb:
            from dsx.tracking.wandb import WandbSink

            wandb_sink = WandbSink(
                run_dir, cluster, group=run_name, project=tracking.project, entity=tracking.entity
            )
            sinks.append(wandb_sink)
            location = wandb_sink.location
        return cls(sinks, location)

    def log(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
