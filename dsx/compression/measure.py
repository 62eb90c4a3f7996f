"""How much an encoding leaves out."""

import torch
from torch import Tensor


def relative_error(value: Tensor, decoded: Tensor) -> float:
    """|value - decoded| / |value| in Euclidean norms; 0 for a zero `value` decoded to zero."""
    return relative_norm(value - decoded.to(value.device), value)


def relative_norm(part: Tensor, whole: Tensor) -> float:
    """|part| / |whole| in Euclidean norms, 0 if both are zero: of residual and value, say."""
    size = float(torch.linalg.vector_norm(part, dtype=torch.float64))
    if size == 0.0:
        return 0.0
    return size / max(float(torch.linalg.vector_norm(whole, dtype=torch.float64)), 5e-324)
