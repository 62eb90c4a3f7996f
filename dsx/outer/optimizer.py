"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

from collections.abc import Mapping

import torch


class OuterOptimizer:
    """Shared weights theta and outer momentum m; fp32, changed only by `step`.

    `m = mu m + Delta; theta = theta - eta (Delta + mu m)`, as in DiLoCo (arXiv 2311.08105) and as
    `torch.optim.SGD(nesterov=True)`. mu = 0 is plain SGD; with eta = 1 as well it is averaging.

    Args:
        weights: first value of theta, by parameter name. Taken over, not copied.
        lr: eta.
        momentum: mu, 0 <= mu < 1.
    """

    def __init__(self, weights: dict[str, torch.Tensor], lr: float, momentum: float) -> None:
        self.theta = weights
        self.momentum = {name: torch.zeros_like(value) for name, value in weights.items()}
        self._lr = lr
        self._mu = momentum

    @property
    def lr(self) -> float:
        return self._lr

    @torch.no_grad()
    def step(self, average: Mapping[str, torch.Tensor]) -> None:
        """One outer step with the averaged pseudo-gradient Delta (same names and shapes)."""
        for name, theta in self.theta.items():
            delta = average[name]
            if self._mu == 0:
                theta.sub_(delta, alpha=self._lr)
                continue
            momentum = self.momentum[name]
            momentum.mul_(self._mu).add_(delta)
            theta.sub_(delta.add(momentum, alpha=self._mu), alpha=self._lr)
