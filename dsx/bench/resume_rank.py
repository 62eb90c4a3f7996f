"""One rank of `dsx bench resume`: several runs one after the other, some of them stopped."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsx.errors import LaunchError
from dsx.settings import parse_settings
from dsx.training.preflight import preflight
from dsx.training.run import ClusterRun, Launch


@dataclass(frozen=True)
class Request:
    """One run of all clusters, from its start or its last checkpoint on."""

    settings: dict[str, Any]
    coordinator: str
    stop: int | None
    """Inner step after which it is asked to end."""


class _StoppingRun(ClusterRun):
    """Sends itself a SIGTERM after inner step `stop`."""

    stop: int | None = None

    def _inner_step(self) -> None:
        super()._inner_step()
        if self.step == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)


def make_runs(cluster: str, requests: Sequence[Request]) -> None:
    """This rank's part of all of them."""
    ranks = int(os.environ["WORLD_SIZE"])
    for request in requests:
        settings = parse_settings(request.settings)
        ready = preflight(settings, ranks, check_split=False)
        run = _StoppingRun(settings, Launch(cluster, request.coordinator, None, "auto"), ready)
        run.stop = request.stop
        if run.train() == (run.stop is not None):
            raise LaunchError(f"the run of {settings.dsx.run_dir} ended at step {run.step}")
        run.saver.close()
        run.abandon()
    run.engine.agreement.barrier()
