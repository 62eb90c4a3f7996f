"""Joining the ranks of one cluster, on one network and no other."""

import os
import socket
from datetime import timedelta

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsx.errors import LaunchError
from dsx.exchange.secret import is_loopback

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def initialize(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Open the process group of this cluster; collective, and nothing if it is open already.

    The ranks come from the launcher's environment. Without any of its variables this process is a
    cluster of one rank. Raises LaunchError when only some of them are set, and on rank 0 when it
    can't listen on MASTER_ADDR.
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
    if is_loopback(os.environ["MASTER_ADDR"]):
        # Left alone, gloo listens on the address that this machine's name leads to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    if get_accelerator().device_name() == "cpu":
        backend = "gloo"
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        backend = get_accelerator().communication_backend_name()
    _join_process_group(backend, timeout)
    # DeepSpeed would compile an operator for tensor-parallel inference here, which needs a compiler
    # and most of a minute on a fresh machine, and which nothing in training calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend, timeout=timeout, verbose=False)


def _join_process_group(backend: str, timeout: timedelta) -> None:
    """What DeepSpeed would do itself, but for the store, which would listen on all interfaces."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listen(host, port, world_size) if rank == 0 else None
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    device = None
    if backend == "nccl" and world_size > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )


def _listen(host: str, port: int, world_size: int) -> socket.socket:
    if is_loopback(host) and world_size > int(os.environ.get("LOCAL_SIZE", world_size)):
        raise LaunchError(
            f"MASTER_ADDR is {host}, which on this machine is the loopback address, but the "
            "cluster has other machines, too; give the launcher an address under which they reach "
            "this one: --master_addr"
        )
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise LaunchError(
            f"rank 0 can't listen on {host}:{port} ({error}); give the launcher an address of this "
            "machine (--master_addr) and a port that is free (--master_port)"
        ) from error


def _loopback_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return str(name)
    raise LaunchError("this machine has no interface with the address 127.0.0.1; bring one up")
