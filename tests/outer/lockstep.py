"""Several clusters in one thread, step by step, as simulation does it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from dsx.exchange.in_process import InProcessHub
from dsx.exchange.interface import Exchange
from dsx.outer.engine import OuterEngine, RoundReport
from dsx.outer.weights import ModuleWeights
from dsx.settings.dsx_block import OuterSettings

FEATURES = 6
LOSSLESS = {"matrices": "none", "embeddings": "none", "vectors": "none"}


class Cluster:
    """A tiny regression model with its optimizer and outer engine."""

    def __init__(
        self,
        settings: OuterSettings,
        exchange: Exchange,
        index: int = 0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        lr: float = 1e-2,
        width: int = 8,
        **options: float,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=lr, **options)
        self.exchange = exchange
        self.engine = OuterEngine(settings, ModuleWeights(self.model), exchange)
        self.index = index
        self.step = 0
        self.reports: list[RoundReport] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.step + self.index)
        inputs = torch.randn(4, FEATURES, generator=generator)
        return inputs, inputs.sum(1, keepdim=True).sin()

    def train(self, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        inputs, targets = batch or self.batch()
        self.optimizer.zero_grad()
        ((self.model(inputs) - targets) ** 2).mean().backward()
        self.optimizer.step()
        self.step += 1

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def keep(self, report: RoundReport | None) -> None:
        if report is not None:
            self.reports.append(report)


STEP_SAMPLES = 4


class Reader(Cluster):
    """Trains the samples that its lease gives it."""

    def __init__(
        self,
        settings: OuterSettings,
        exchange: Exchange,
        index: int = 0,
        stop_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(settings, exchange, index)
        self.engine = OuterEngine(
            settings,
            ModuleWeights(self.model),
            exchange,
            step_samples=STEP_SAMPLES,
            stop_wanted=stop_wanted,
        )
        self.drawn: list[int] = []

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        positions = list(self.engine.draw())
        self.drawn += positions
        rows = [
            torch.randn(FEATURES, generator=torch.Generator().manual_seed(position))
            for position in positions
        ]
        inputs = torch.stack(rows)
        return inputs, inputs.sum(1, keepdim=True).sin()


def make_clusters(settings: OuterSettings, count: int, **options: object) -> list[Cluster]:
    hub = InProcessHub([f"c{index}" for index in range(count)], timeout_seconds=30)
    return [
        Cluster(settings, hub.exchange(f"c{index}"), index, **options)  # type: ignore[arg-type]
        for index in range(count)
    ]


def together(clusters: Sequence[Cluster], what: Callable[[Cluster], object]) -> list[object]:
    """Run something that waits for the other clusters on all of them at once."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(what, clusters))


def run(clusters: Sequence[Cluster], steps: int, finish: bool = True) -> None:
    together(clusters, lambda cluster: cluster.engine.start())
    for _ in range(steps):
        for cluster in clusters:
            cluster.train()
            cluster.keep(cluster.engine.advance(tokens=4, seconds=0.01))
        for cluster in clusters:
            cluster.keep(cluster.engine.settle())
    if finish:
        for cluster, reports in zip(
            clusters, together(clusters, lambda cluster: cluster.engine.finish()), strict=True
        ):
            cluster.reports.extend(reports)  # type: ignore[arg-type]
