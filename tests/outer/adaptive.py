"""Clusters whose times are made up, so that what they decide is known."""

from typing import Any

import torch
from torch import nn

from dsx.exchange.in_process import InProcessHub
from dsx.exchange.interface import Exchange
from dsx.outer.engine import OuterEngine, RoundReport
from dsx.outer.weights import ModuleWeights
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import FEATURES, Cluster
from tests.outer.test_snapshot import Gate

SIDE = 32
LOW_RANK = {"matrices": {"type": "lowrank", "rank": 6, "factors": "int8"}}
RULES: dict[str, dict[str, Any]] = {
    "link": {"adapt": {"local_steps": {"type": "link", "share": 0.5, "min": 2}}},
    "paper": {
        "adapt": {"local_steps": "paper", "rank": {"type": "paper", "window": 3, "eps": 0.1}},
        "compression": LOW_RANK,
    },
    "energy": {
        "adapt": {"rank": {"type": "energy", "eps": 0.15, "budget_bytes": 1500}},
        "compression": LOW_RANK,
    },
    "energy, link": {
        "adapt": {
            "local_steps": {"type": "link", "share": 0.5, "min": 2},
            "rank": {"type": "energy", "eps": 0.15, "budget_bytes": 1500},
        },
        "compression": {**LOW_RANK, "averaging": "scatter"},
    },
}


def settings_of(rule: str, **more: Any) -> OuterSettings:
    values = {"local_steps": 6, "start_clusters": 2, **RULES[rule], **more}
    return OuterSettings.model_validate(values)


class Adaptive(Cluster):
    """Cluster `index` is slower than the ones before it, in steps and in exchanges."""

    def __init__(self, settings: OuterSettings, exchange: Exchange, index: int = 0) -> None:
        super().__init__(settings, exchange, index)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._now = 0.0
        self.engine = OuterEngine(
            settings,
            ModuleWeights(self.model),
            exchange,
            on_commit=self._note_choice,
            clock=self.clock,
        )
        self.chosen: dict[int, tuple[int, int]] = {}
        """By round, inner steps and rank that were chosen when it was committed."""
        self.step_seconds = (1 + self.index) / 64

    def clock(self) -> float:
        """Two looks at it are apart by what the round that ends with the second one takes."""
        engine = self.__dict__.get("engine")
        round_ = engine.round if engine is not None else 0
        self._now += (1 + self.index + (round_ // 3) % 4) / 64
        return self._now

    def _note_choice(self, report: RoundReport) -> None:
        progress = self.engine.state.progress
        self.chosen[report.round] = progress.next_local_steps, progress.next_rank

    def inner_step(self) -> None:
        """Train, and tell the engine."""
        self.train()
        self.keep(self.engine.advance(tokens=4, seconds=self.step_seconds))

    def decided(self) -> list[tuple[int, int, int, int]]:
        """Per round: number, inner steps, rank, delay."""
        return [(r.round, r.local_steps, r.rank, r.delay) for r in self.reports]


def adaptive(settings: OuterSettings, count: int = 2) -> list[Adaptive]:
    hub = InProcessHub([f"c{index}" for index in range(count)], timeout_seconds=30)
    return [
        Adaptive(settings, Gate(hub.exchange(f"c{index}")), index)  # type: ignore[arg-type]
        for index in range(count)
    ]


def step(clusters: list[Adaptive]) -> None:
    """One inner step on every cluster."""
    for cluster in clusters:
        cluster.inner_step()
    for cluster in clusters:
        cluster.keep(cluster.engine.settle())
