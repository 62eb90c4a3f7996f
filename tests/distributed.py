"""Run one function on several real processes, as the ranks of one cluster.

The ranks are forked from a server that has imported torch and DeepSpeed once, so that only the
first call of a test session pays for those imports (about 6 s on one core).
"""

import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOAD = (
    "deepspeed",
    # What `deepspeed.initialize` imports only when it is called: torch's inductor, above all.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "dsx.cluster.engine",
    "dsx.models.plan",
)
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> int:
    """A TCP port on the loopback address that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: str, world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function` ("package.module:name") with `args` on `world_size` processes.

    Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    as under the `deepspeed` launcher, and imports DeepSpeed for the CPU. Arguments and results are
    pickled. Returns the results in rank order. Raises AssertionError with the output of the failed
    ranks when one raises, dies or outlives `timeout` seconds; no process survives the call.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dsx-ranks-") as name:
        folder = Path(name)
        ranks = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world_size, port, folder, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _join(ranks, time.monotonic() + timeout)
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        if failed:
            raise AssertionError(_describe(function, ranks, failed, folder))
        return [
            pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def _join(ranks: list[Any], deadline: float) -> None:
    """Wait until all ranks have ended, one has failed, or the deadline has passed."""
    alive = {process.sentinel: process for process in ranks}
    while alive:
        ended = wait(list(alive), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return
        if any(alive.pop(sentinel).exitcode != 0 for sentinel in ended):  # type: ignore[call-overload]
            wait(list(alive), timeout=2.0)  # others may be about to say more
            return


def _describe(function: str, ranks: list[Any], failed: list[int], folder: Path) -> str:
    lines = [f"{function}: ranks {failed} of {len(ranks)} failed or did not end in time"]
    for rank in failed:
        output = folder / f"output-{rank}"
        text = output.read_text(errors="replace") if output.exists() else ""
        lines.append(f"--- rank {rank}, exit code {ranks[rank].exitcode}\n{text[-6000:]}")
    return "\n".join(lines)


def _rank_main(
    function: str, rank: int, world_size: int, port: int, folder: Path, args: tuple[Any, ...]
) -> None:
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    gc.freeze()  # what was imported before the fork is not worth the collections DeepSpeed forces
    try:
        import torch

        torch.set_num_threads(1)
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(*args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ending without interpreter teardown: gloo's threads may still hold sockets of finished peers.
    os._exit(0)
