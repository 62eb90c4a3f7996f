"""One rank of a cluster without DeepSpeed: a made-up model, the real engine, exchange and sockets.

It starts in a tenth of the time, so that a test can break many. Ranks of a cluster hold different
parameters, as stages do, and wait for each other at every step.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dsx.bench.faults import Injector, Plan
from dsx.cluster.agreement import ClusterAgreement
from dsx.outer.engine import OuterEngine
from dsx.outer.weights import ModuleWeights
from dsx.settings.dsx_block import OuterSettings
from dsx.training.meeting import meet

STEP_SECONDS = 0.02
TOKENS = 8
TOLD = ("round", "participants", "shared_digest", "tokens_total")
"""Of every report."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--cluster", "--port", "--coordinator", "--settings"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--plan", "--out", "--end"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    rank, cluster = arguments.rank, arguments.cluster
    logging.basicConfig(format=f"%(asctime)s {cluster}/{rank} %(message)s", level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        rank=rank,
        world_size=arguments.ranks,
    )
    agreement = ClusterAgreement()
    settings = OuterSettings.model_validate_json(arguments.settings)
    meeting = meet(
        cluster,
        arguments.coordinator,
        "127.0.0.1",
        rank,
        arguments.ranks,
        ClusterAgreement(),
        settings.timeout_seconds,
    )
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    engine = OuterEngine(settings, ModuleWeights(model), meeting.exchange, agreement=agreement)
    injector = Injector(Plan(arguments.plan), cluster, rank, lambda: engine.round)
    engine.watch(injector.phase)

    def tell(reports: list) -> None:
        if rank == 0:
            with arguments.out.open("a") as file:
                for report in reports:
                    told = {name: getattr(report, name) for name in TOLD}
                    file.write(json.dumps(told | {"time": time.time()}) + "\n")

    engine.start()
    generator = torch.Generator().manual_seed(hash((cluster, os.getpid())) % 2**32)
    while not agreement.maximum([float(arguments.end.exists())])[0]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        time.sleep(STEP_SECONDS)
        reports = [engine.advance(TOKENS, STEP_SECONDS), engine.settle()]
        tell([report for report in reports if report is not None])
    tell(engine.finish())
    engine.close()
    meeting.close()
    logging.info("over after round %d", engine.round)
    os._exit(0)


if __name__ == "__main__":
    main()
