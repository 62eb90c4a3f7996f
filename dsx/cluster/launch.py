"""The command that starts a cluster of several on this machine: the real `deepspeed`."""

import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.errors import LaunchError

# Below the range from which Linux takes the ports of outgoing connections (32768 and up), so that
# a port which is free now isn't taken by a connection before its cluster listens on it.
_PORTS = range(15_000, 32_000)


@dataclass(frozen=True)
class ClusterLaunch:
    """How one cluster is started."""

    cluster: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def cluster_names(count: int) -> list[str]:
    """c0, c1, ..."""
    return [f"c{index}" for index in range(count)]


def plan_launches(
    settings_arguments: Sequence[str],
    clusters: int,
    processes: int,
    coordinator: str | None,
    log_of: Callable[[str], Path],
    *,
    gpus: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    deepspeed: Path | None = None,
) -> list[ClusterLaunch]:
    """The commands for `clusters` clusters of `processes` ranks each.

    Args:
        settings_arguments: `--deepspeed_config F [--set ...]`, handed to every rank.
        coordinator: URL that the clusters meet at; None: each trains alone.
        log_of: cluster name -> its log file.
        gpus: devices to share out, each to one rank; none means that all ranks use the CPU.
        environment: the present process's by default.
        deepspeed: the `deepspeed` command; by default the one beside this Python.

    Raises:
        LaunchError: there is no `deepspeed` command, or there are too few GPUs.
    """
    executable = deepspeed or deepspeed_command()
    base = dict(os.environ if environment is None else environment)
    needed = clusters * processes
    if gpus and len(gpus) < needed:
        raise LaunchError(
            f"{clusters} clusters of {processes} processes need {needed} GPUs, but {len(gpus)} "
            "can be used here; start fewer clusters, use fewer stages or replicas, or set "
            "DS_ACCELERATOR=cpu in the environment to train on the CPU"
        )
    base.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // needed)))
    if gpus:
        # DeepSpeed drops this variable when devices are named on its command line, but only
        # after its device count was limited by it.
        base.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        base["DS_ACCELERATOR"] = "cpu"
    launches = []
    for index, (name, port) in enumerate(
        zip(cluster_names(clusters), free_ports(clusters), strict=True)
    ):
        own = gpus[index * processes : (index + 1) * processes]
        devices = (
            ["--include", "localhost:" + ",".join(map(str, own))]
            if own
            else ["--num_gpus", str(processes)]
        )
        command = (
            str(executable),
            *devices,
            *("--master_port", str(port)),
            *("--module", "dsx.train"),
            *settings_arguments,
            *("--cluster", name),
            *(("--coordinator", coordinator) if coordinator is not None else ()),
        )
        launches.append(ClusterLaunch(name, command, base, log_of(name)))
    return launches


def deepspeed_command() -> Path:
    """The `deepspeed` command of this Python's environment. Raises `LaunchError` without one."""
    path = Path(sys.executable).parent / "deepspeed"
    if not path.is_file():
        raise LaunchError(
            f"there is no deepspeed command at {path}; install dsx with its dependencies into the "
            "environment of this Python (pip install .)"
        )
    return path


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[int]:
    """Indices of the GPUs that may be used here; none when DS_ACCELERATOR says cpu.

    Raises `LaunchError` when CUDA_VISIBLE_DEVICES names them by anything but their index, which
    DeepSpeed's launcher can't take.
    """
    env = os.environ if environment is None else environment
    if env.get("DS_ACCELERATOR") == "cpu":
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(torch.cuda.device_count()))
    try:
        return [int(entry) for entry in listed.split(",") if entry.strip()]
    except ValueError:
        raise LaunchError(
            f"CUDA_VISIBLE_DEVICES is {listed!r}, but DeepSpeed's launcher takes indices only; "
            "write it as, for example, 0,1"
        ) from None


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that nothing on this machine listens on.

    Raises `LaunchError` when there are not enough.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            return found
        if _is_free(port):
            found.append(port)
    raise LaunchError(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
