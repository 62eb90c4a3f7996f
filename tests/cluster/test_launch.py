"""The commands that start the clusters of one machine."""

import socket
from pathlib import Path

import pytest
import torch

from dsx.cluster import launch
from dsx.cluster.launch import ClusterLaunch, free_ports, plan_launches, visible_gpus
from dsx.errors import LaunchError

SETTINGS = ["--deepspeed_config", "f.json", "--set", "dsx.seed=1"]
URL = "http://127.0.0.1:29510"


def plan(clusters: int = 2, processes: int = 2, **options) -> list[ClusterLaunch]:
    return plan_launches(
        SETTINGS,
        clusters,
        processes,
        URL,
        lambda name: Path("logs") / f"{name}.log",
        deepspeed=Path("bin/deepspeed"),
        **({"environment": {}} | options),
    )


def test_each_cluster_is_a_deepspeed_command_with_its_own_name_and_port():
    first, second = plan()
    ports = [entry.command[entry.command.index("--master_port") + 1] for entry in (first, second)]
    assert ports[0] != ports[1]
    for index, (entry, port) in enumerate(zip((first, second), ports, strict=True)):
        assert entry.cluster == f"c{index}"
        assert entry.log == Path("logs") / f"c{index}.log"
        assert entry.command == (
            "bin/deepspeed",
            "--num_gpus",
            "2",
            "--master_port",
            port,
            "--module",
            "dsx.train",
            *SETTINGS,
            "--cluster",
            f"c{index}",
            "--coordinator",
            URL,
        )


def test_without_a_gpu_the_ranks_share_the_cores_of_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "usable_cores", lambda: 9)
    [entry, _] = plan(environment={"HOME": "h"})
    assert entry.environment == {"HOME": "h", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "2"}
    [entry, *_] = plan(clusters=8, environment={})
    assert entry.environment["OMP_NUM_THREADS"] == "1"
    [entry, _] = plan(environment={"OMP_NUM_THREADS": "7"})
    assert entry.environment["OMP_NUM_THREADS"] == "7"


def test_gpus_are_shared_out_by_index():
    entries = plan(gpus=[0, 2, 3, 5, 6], environment={"CUDA_VISIBLE_DEVICES": "0,2,3,5,6"})
    assert [entry.command[1:3] for entry in entries] == [
        ("--include", "localhost:0,2"),
        ("--include", "localhost:3,5"),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in entries[0].environment
    assert "DS_ACCELERATOR" not in entries[0].environment


def test_too_few_gpus_are_refused_with_the_numbers():
    with pytest.raises(LaunchError, match="2 clusters of 2 processes need 4 GPUs, but 3 can be"):
        plan(gpus=[0, 1, 2])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, [3, 1]),
        ({"DS_ACCELERATOR": "cpu"}, []),
    ],
)
def test_the_gpus_to_use_follow_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: list[int]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert visible_gpus(environment) == expected


def test_gpus_named_by_anything_but_an_index_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(LaunchError, match="'GPU-8f2a', but DeepSpeed's launcher takes indices"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f2a"})


def test_ports_differ_and_none_is_in_use(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch, "_PORTS", range(port, port + 30))
        found = free_ports(5)
    assert len(set(found)) == 5
    assert port not in found


def test_more_ports_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_PORTS", range(20_000, 20_003))
    with pytest.raises(LaunchError, match="fewer than 4 ports from 20000 to 20003"):
        free_ports(4)


def test_a_missing_deepspeed_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match="there is no deepspeed command at"):
        launch.deepspeed_command()
