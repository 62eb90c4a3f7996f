"""The commands of one run on a slow link: real `deepspeed` launches, each in its place."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsx.bench.link.watch import CLUSTER
from dsx.bench.namespaces import INTERFACE, SlowLink
from dsx.cluster.launch import ClusterLaunch, cluster_names, plan_launches, usable_cores
from dsx.tracking.progress import log_path

COORDINATOR_PORT = 29510
LIGHTHOUSE_PORT = 29511
_MASTER_PORT = 29500
"""Every cluster has ports of its own."""


def coordinator_url(link: SlowLink) -> str:
    """Where `dsx coordinator` listens at the hub."""
    return f"http://{link.hub_address}:{COORDINATOR_PORT}"


def separate_clusters(
    link: SlowLink,
    clusters: int,
    stages: int,
    settings_arguments: Sequence[str],
    run_dir: str,
    coordinator: str | None,
) -> list[ClusterLaunch]:
    """A launch per cluster, of one rank per stage."""
    launches = plan_launches(
        settings_arguments, clusters, stages, coordinator, lambda name: log_path(run_dir, name)
    )
    # Inside a cluster DeepSpeed's ranks meet on the loopback interface.
    return [_placed(launch, link, cluster, "lo") for cluster, launch in enumerate(launches)]


def one_job(
    link: SlowLink,
    clusters: int,
    stages: int,
    settings_arguments: Sequence[str],
    run_dir: str,
) -> list[ClusterLaunch]:
    """DeepSpeed's own data parallelism across the clusters: a replica of the pipeline in each.

    DeepSpeed deals out ranks host by host, and rank = stage x replicas + replica. So each rank is a
    host of one slot here, which `--no_ssh` lets us start where it belongs.
    """
    name = cluster_names(1)[0]
    (base,) = plan_launches(
        settings_arguments, 1, stages, None, lambda name: log_path(run_dir, name)
    )
    arguments = base.command[base.command.index("--module") :]
    places = [(stage, cluster) for stage in range(stages) for cluster in range(clusters)]
    hosts = Path(run_dir) / "hosts"
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text("".join(f"c{cluster}-{stage} slots=1\n" for stage, cluster in places))
    launches = []
    for rank, (stage, cluster) in enumerate(places):
        command = (
            base.command[0],
            *("--hostfile", str(hosts), "--no_ssh", "--node_rank", str(rank)),
            *("--master_addr", link.address(0), "--master_port", str(_MASTER_PORT)),
            *arguments,
        )
        log = log_path(run_dir, name if rank == 0 else f"{name}-rank-{rank}")
        launch = ClusterLaunch(f"c{cluster}-{stage}", command, base.environment, log)
        launches.append(_placed(launch, link, cluster, INTERFACE))
    return launches


def torchft_clusters(
    link: SlowLink, clusters: int, settings_arguments: Sequence[str], run_dir: str
) -> list[ClusterLaunch]:
    """torchft's own DiLoCo: a process per cluster, all of which meet at torchft's lighthouse."""
    launches = []
    for cluster, name in enumerate(cluster_names(clusters)):
        command = (
            *(sys.executable, "-m", "dsx.bench.link.torchft_rank", *settings_arguments),
            *("--cluster", name, "--place", str(cluster), "--clusters", str(clusters)),
            *("--lighthouse", f"http://{link.hub_address}:{LIGHTHOUSE_PORT}"),
            *("--address", link.address(cluster)),
        )
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0"}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // clusters)))
        launch = ClusterLaunch(name, command, environment, log_path(run_dir, name))
        launches.append(_placed(launch, link, cluster, INTERFACE))
    return launches


def _placed(launch: ClusterLaunch, link: SlowLink, cluster: int, interface: str) -> ClusterLaunch:
    return replace(
        launch,
        command=(*link.inside(cluster), *launch.command),
        environment={
            **launch.environment,
            **link.environment,
            "GLOO_SOCKET_IFNAME": interface,
            CLUSTER: cluster_names(cluster + 1)[cluster],
        },
    )
