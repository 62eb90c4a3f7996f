"""Ranks of clusters as processes forked from one that has imported what they need.

Each is as fresh as one that was started by the `deepspeed` command, without the seconds that its
imports cost: for benches that start hundreds of them.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dsx.cluster.launch import free_ports
from dsx.errors import LaunchError

_PRELOAD = (
    "deepspeed",
    # What `deepspeed.initialize` imports only when it is called: torch's inductor, above all.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "transformers.models.llama.modeling_llama",
    "dsx.training.run",
)
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_forked(function: str, clusters: Mapping[str, int], folder: Path, *args: Any) -> None:
    """Call `function` ("package.module:name") with a cluster's name and `args` on all its ranks.

    Runs on the CPU. No process is left when it returns or raises.

    Args:
        clusters: name -> ranks; all start at once.
        folder: for what the ranks print.
        args: are pickled.

    Raises:
        LaunchError: a rank failed; the end of its output is in the message.
    """
    os.environ.update(_ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    ports = free_ports(len(clusters))
    processes = {}
    for (cluster, ranks), port in zip(clusters.items(), ports, strict=True):
        for rank in range(ranks):
            output = folder / f"output-{cluster}-{rank}"
            place = (rank, ranks, port)
            processes[output] = context.Process(
                target=_main, args=(function, place, output, cluster, *args), daemon=True
            )
    try:
        for process in processes.values():
            process.start()
        alive = [process.sentinel for process in processes.values()]
        while alive and not any(process.exitcode for process in processes.values()):
            for sentinel in wait(alive):
                alive.remove(sentinel)  # type: ignore[arg-type]
        if alive:
            time.sleep(2.0)  # the cause of a failure may be another one that comes a moment later
    finally:
        failed = [(output, p.exitcode) for output, p in processes.items() if p.exitcode]
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()
    if failed:
        told = [
            f"{output.name} (exit code {code}):\n{output.read_text(errors='replace')[-4000:]}"
            for output, code in failed
        ]
        raise LaunchError("ranks of the bench failed\n" + "\n".join(told))


def _main(function: str, place: tuple[int, int, int], output: Path, *args: Any) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    rank, ranks, port = map(str, place)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    gc.freeze()  # what was imported before the fork is not worth the collections DeepSpeed forces
    try:
        import torch

        torch.set_num_threads(1)
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    # No teardown: exchanges of stopped runs may still be in the air, and no thread is waited for.
    os._exit(0)
