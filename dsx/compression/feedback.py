"""Error feedback: what an encoding left out is added to the next update.

Per tensor, with beta the decay: `v = beta e + delta` is encoded to b, and when the round commits
`e = v - decode(b)` (arXiv 1901.09847; with decay, SparseLoCo, arXiv 2508.15706).
"""

import torch
from torch import Tensor

from dsx.errors import CheckpointError


class ErrorFeedback:
    """The residuals of one rank, by tensor name, fp32, on the CPU.

    They change in `commit` only, at once for all tensors: a round that is retried or given up
    encodes the same values again.

    Args:
        decay: beta, from 0 (no feedback) to 1 (nothing is forgotten).
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._residuals: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    def add(self, name: str, delta: Tensor) -> Tensor:
        """v = beta e + delta: a new fp32 tensor of delta's shape, on its device."""
        residual = self._residuals.get(name)
        if residual is None or self.decay == 0:
            return delta.float().clone() if delta.dtype == torch.float32 else delta.float()
        return torch.add(delta, residual.to(delta.device), alpha=self.decay)

    def subtract(self, name: str, value: Tensor) -> Tensor:
        """`value - e` as a new tensor; `value` itself where nothing was left out yet."""
        residual = self._residuals.get(name)
        return value if residual is None else value - residual.to(value.device)

    def stage(self, name: str, residual: Tensor) -> None:
        """Note `v - decoded` for the commit; a later call for the same name replaces it."""
        if self.decay:
            self._staged[name] = residual.detach().to("cpu", torch.float32)

    def commit(self) -> None:
        """The round counts: what was staged becomes the residuals. Others stay as they are."""
        self._residuals.update(self._staged)
        self._staged = {}

    def discard(self) -> None:
        """The round does not count: forget what was staged."""
        self._staged = {}

    def norm(self) -> float:
        """Euclidean norm of all residuals."""
        return sum(float(e.double().square().sum()) for e in self._residuals.values()) ** 0.5

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals by tensor name (not copies)."""
        return dict(self._residuals)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over residuals; drops what is staged.

        Raises:
            CheckpointError: a residual is not finite.
        """
        for name, residual in state.items():
            if not bool(torch.isfinite(residual).all()):
                raise CheckpointError(
                    f"the error feedback of {name} in the checkpoint is not finite; resume from "
                    "an older checkpoint, or leave the residuals out"
                )
        self._residuals = {name: value.to("cpu", torch.float32) for name, value in state.items()}
        self._staged = {}
