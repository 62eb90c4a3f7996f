"""E3: theta follows torch's SGD fed with the mean pseudo-gradient."""

import pytest
import torch

from dsx.outer.optimizer import OuterOptimizer


@pytest.mark.parametrize("warmup_steps", [0, 70])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.3, 0.0), (0.7, 0.7), (0.7, 0.9)])
def test_the_outer_step_is_nesterov_sgd_of_torch_in_float64(
    lr: float, momentum: float, warmup_steps: int
) -> None:
    generator = torch.Generator().manual_seed(1)

    def made_up() -> torch.Tensor:
        return torch.randn(5, 3, generator=generator, dtype=torch.float64)

    first = made_up()
    parameter = torch.nn.Parameter(first.clone())
    reference = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer = OuterOptimizer({"w": first.clone()}, lr, momentum, warmup_steps)
    for round_ in range(20):
        delta = made_up()
        if warmup_steps and momentum:
            # At 0 torch would not remember the gradient.
            reference.param_groups[0]["momentum"] = momentum * min(1, round_ / 7) or 1e-300
        parameter.grad = delta.clone()
        reference.step()
        outer.step({"w": delta}, steps=10 * round_)
        torch.testing.assert_close(outer.theta["w"], parameter.data, rtol=1e-12, atol=1e-12)
