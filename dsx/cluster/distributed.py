"""Joining the ranks of one cluster."""

import os
import socket
from datetime import timedelta

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsx.errors import LaunchError

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Open the process group of this cluster; collective, and nothing if it is open already.

    The ranks come from the launcher's environment. Without any of its variables this process is a
    cluster of one rank. Raises LaunchError when only some of them are set.
    """
    if dist.is_initialized():
        return
    missing = [name for name in _VARIABLES if name not in os.environ]
    if len(missing) == len(_VARIABLES):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    elif missing:
        raise LaunchError(
            f"the environment has no {', '.join(missing)}; start the ranks with the `deepspeed` "
            f"launcher, or unset all of {', '.join(_VARIABLES)} for a single rank"
        )
    if get_accelerator().device_name() == "cpu":
        backend = "gloo"
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        backend = get_accelerator().communication_backend_name()
    # DeepSpeed would compile an operator for tensor-parallel inference here, which needs a compiler
    # and most of a minute on a fresh machine, and which nothing in training calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend, timeout=timeout, verbose=False)
