"""The outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

from collections.abc import Mapping

import torch


class OuterOptimizer:
    """Shared weights theta and outer momentum m; fp32, changed only by `step`.

    `m = mu m + Delta; theta = theta - eta (Delta + mu m)`, as in DiLoCo (arXiv 2311.08105) and as
    `torch.optim.SGD(nesterov=True)`. mu = 0 is plain SGD; with eta = 1 as well it is averaging.
    mu grows from 0 while the inner steps of the run before the round do from 0 to `warmup_steps`.

    Args:
        weights: first value of theta, by parameter name. Taken over, not copied.
        lr: eta.
        momentum: the greatest mu, 0 <= mu < 1.
        warmup_steps: inner steps; 0: mu is what it is from the first round on.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        lr: float,
        momentum: float,
        warmup_steps: int = 0,
    ) -> None:
        self.theta = weights
        self.momentum = {name: torch.zeros_like(value) for name, value in weights.items()}
        self._lr = lr
        self._mu = momentum
        self._warmup_steps = warmup_steps

    def mu(self, steps: int) -> float:
        """The momentum of a round before which the run had made so many inner steps."""
        return self._mu * min(1.0, steps / self._warmup_steps) if self._warmup_steps else self._mu

    @torch.no_grad()
    def step(self, average: Mapping[str, torch.Tensor], steps: int = 0) -> None:
        """One outer step with the averaged pseudo-gradient Delta (same names and shapes).

        Args:
            steps: inner steps of the run before the round that ends with this one.
        """
        mu = self.mu(steps)
        for name, theta in self.theta.items():
            delta = average[name]
            if self._mu == 0:
                theta.sub_(delta, alpha=self._lr)
                continue
            momentum = self.momentum[name]
            momentum.mul_(mu).add_(delta)
            theta.sub_(delta.add(momentum, alpha=mu), alpha=self._lr)
