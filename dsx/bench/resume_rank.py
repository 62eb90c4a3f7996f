"""One rank of `dsx bench resume`: several runs one after the other, some of them stopped."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from dsx.settings import parse_settings
from dsx.training.preflight import preflight
from dsx.training.run import ClusterRun, Launch


class _StoppingRun(ClusterRun):
    """Sends itself a SIGTERM after inner step `stop`."""

    stop: int | None = None

    def _inner_step(self) -> None:
        super()._inner_step()
        if self.step == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    for request in json.loads(arguments.requests.read_text()):
        settings = parse_settings(request["settings"])
        ready = preflight(settings, ranks, check_split=False)
        launch = Launch(arguments.cluster, request["coordinator"], None, "auto")
        run = _StoppingRun(settings, launch, ready)
        run.stop = request["stop"]
        if run.train() == (run.stop is not None):
            sys.exit(f"the run of {settings.dsx.run_dir} ended at step {run.step}")
        run.saver.close()
        run.abandon()
    run.engine.agreement.barrier()
    # Exchanges of stopped runs are still in the air: no thread is waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
