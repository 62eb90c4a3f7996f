"""One cluster of `dsx bench scale`: the outer engine alone, on weights that nobody trains."""

import ctypes
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dsx.bench.namespaces import SlowLink
from dsx.cluster.launch import cluster_names
from dsx.exchange.secret import RunSecret
from dsx.outer.agreement import AloneAgreement
from dsx.outer.engine import OuterEngine
from dsx.settings.dsx_block import OuterSettings
from dsx.training.meeting import meet

VOCABULARY_PER_WIDTH = 16
_LAYERS = 4
_PR_SET_PDEATHSIG = 1
_TOKENS = 1024


@dataclass(frozen=True)
class ScaleCluster:
    """What a cluster needs to know."""

    index: int
    clusters: int
    parameters: int
    settings: OuterSettings
    coordinator: str
    secret: RunSecret


class MadeUpWeights:
    """`LocalWeights` of a Llama's shapes; a step of training is noise."""

    def __init__(self, parameters: int, seed: int) -> None:
        self._noise = torch.Generator().manual_seed(seed)
        start = torch.Generator().manual_seed(0)
        self._tensors = {
            name: 0.02 * torch.randn(shape, generator=start)
            for name, shape in llama_shapes(parameters).items()
        }

    def shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self._tensors.items()}

    def fetch(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._tensors.items()}

    def store(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            self._tensors[name].copy_(value)

    def step(self) -> None:
        for value in self._tensors.values():
            value.add_(torch.randn(value.shape, generator=self._noise), alpha=1e-3)


def llama_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama of four layers and about so many parameters."""
    # Per layer 4 matrices of the attention and 3 of the MLP, and two of the vocabulary.
    squares = _LAYERS * (4 + 3 * 8 / 3) + 2 * VOCABULARY_PER_WIDTH
    width = max(24, 24 * round(math.sqrt(parameters / squares) / 24))
    inner = width * 8 // 3
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY_PER_WIDTH * width, width)}
    for layer in range(_LAYERS):
        for name in ("q", "k", "v", "o"):
            shapes[f"{layer}.{name}"] = (width, width)
        shapes |= {f"{layer}.gate": (inner, width), f"{layer}.up": (inner, width)}
        shapes |= {f"{layer}.down": (width, inner), f"{layer}.norm": (width,)}
    return shapes | {"head": (VOCABULARY_PER_WIDTH * width, width)}


def run_cluster(task: ScaleCluster, link: SlowLink, pipe: Connection) -> None:
    """The body of a forked process.

    It sends "ready" when it has met the others, makes a round at every message that comes, and
    sends what the round was like, until it is killed.
    """
    # Not even a killed bench leaves its clusters behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link.enter(task.index)
    torch.set_num_threads(1)
    meeting = meet(
        cluster_names(task.clusters)[task.index],
        task.coordinator,
        link.address(task.index),
        0,
        1,
        AloneAgreement(),
        task.settings.timeout_seconds,
        task.secret,
    )
    weights = MadeUpWeights(task.parameters, 1 + task.index)
    vocabulary = weights.shapes()["embed"][0]
    engine = OuterEngine(task.settings, weights, meeting.exchange, vocab_size=vocabulary)
    engine.start()
    pipe.send("ready")
    while True:
        pipe.recv()
        weights.step()
        engine.advance(_TOKENS, 1.0)
        report = engine.settle()
        assert report is not None
        pipe.send(
            {
                "exchange_seconds": report.exchange_seconds,
                "participants": len(report.participants),
                "digest": report.shared_digest,
                "memory": own_memory(),
            }
        )


def own_memory() -> dict[str, int]:
    """Bytes of this process: `private` to it, and `proportional` with its part of shared pages."""
    wanted = {"Pss": "proportional", "Private_Clean": "private", "Private_Dirty": "private"}
    found: dict[str, int] = {"proportional": 0, "private": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in wanted:
            found[wanted[key]] += 1024 * int(value.split()[0])
    return found
