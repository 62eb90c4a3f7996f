"""One rank of a run that is to be broken: as `dsx.train`, with an ear for a plan of faults."""

import argparse
import logging
import os
import sys
from pathlib import Path

from dsx.bench.faults import Injector, Plan
from dsx.cluster.launcher import go_on_command
from dsx.exchange.secret import RunSecret
from dsx.outer.engine import OuterEngine
from dsx.settings import Settings, load_settings
from dsx.training.preflight import Preflight, preflight
from dsx.training.run import ClusterRun, Launch
from dsx.training.stopping import EXIT_STOPPED

MODULE = "dsx.bench.chaos_rank"


class BreakableRun(ClusterRun):
    """A run in which faults happen."""

    def __init__(self, settings: Settings, launch: Launch, ready: Preflight, plan: Plan) -> None:
        super().__init__(settings, launch, ready)
        rank = int(os.environ["RANK"])
        self._injector = Injector(plan, launch.cluster, rank, lambda: self._round)
        self.saver.writer.on_file = lambda: self._injector.phase("save")

    def _join_clusters(self) -> OuterEngine | None:
        outer = super()._join_clusters()
        if outer is not None:
            outer.watch(self._injector.phase)
        return outer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=Path, required=True)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[])
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s {arguments.cluster}/{rank} %(levelname)s %(message)s",
    )
    settings = load_settings(arguments.deepspeed_config, arguments.overrides)
    if rank == 0:
        hostfile = Path(settings.dsx.run_dir) / f"hostfile-{arguments.cluster}"
        again = go_on_command(MODULE, sys.argv[1:], ranks, hostfile)
        logging.info("after an interruption, go on with: %s", again)
    ready = preflight(settings, ranks, check_split=False)
    secret = RunSecret.read(arguments.secret_file)
    launch = Launch(arguments.cluster, arguments.coordinator, None, "auto", secret)
    run = BreakableRun(settings, launch, ready, Plan(arguments.faults))
    if run.train():
        run.close()
        return
    run.abandon()
    # An exchange may still be in the air, for whose end no thread must be waited.
    os._exit(EXIT_STOPPED)


if __name__ == "__main__":
    main()
