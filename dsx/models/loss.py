"""The training loss."""

from torch import Tensor
from torch.nn import functional


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of next-token prediction, in fp32.

    Args:
        logits: (B, T, V), any floating dtype.
        labels: (B, T) int64, the token that follows each position.

    Returns:
        Scalar fp32: the mean over all B * T positions, in nats.
    """
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
