"""E3: theta follows torch's SGD fed with the mean pseudo-gradient."""

import pytest
import torch

from dsx.outer.optimizer import OuterOptimizer


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.3, 0.0), (0.7, 0.7), (0.7, 0.9)])
def test_the_outer_step_is_nesterov_sgd_of_torch_in_float64(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(1)

    def made_up() -> torch.Tensor:
        return torch.randn(5, 3, generator=generator, dtype=torch.float64)

    first = made_up()
    parameter = torch.nn.Parameter(first.clone())
    reference = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    outer = OuterOptimizer({"w": first.clone()}, lr, momentum)
    for _ in range(20):
        delta = made_up()
        parameter.grad = delta.clone()
        reference.step()
        outer.step({"w": delta})
        torch.testing.assert_close(outer.theta["w"], parameter.data, rtol=1e-12, atol=1e-12)
