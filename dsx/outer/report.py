"""What the outer engine tells about a round."""

from dataclasses import dataclass

from dsx.outer.leases import Leases


@dataclass(frozen=True)
class RoundReport:
    """What one committed round cost and did; the same on every rank of a cluster."""

    round: int
    """Number of this round, from 1."""
    participants: tuple[str, ...]
    bytes_sent: int
    """Over the slow link, by all ranks of this cluster."""
    bytes_received: int
    exchange_seconds: float
    """Of the slowest rank, from agreed membership to commit."""
    blocked_seconds: float
    """For which the inner steps of this cluster stood still."""
    local_steps: int
    """Inner steps that this cluster made."""
    rank: int
    """Of the low-rank codec of matrices; 0: another codec."""
    delay: int
    """Inner steps made between the boundary and the arrival of the average."""
    pseudo_gradient_norm: float
    relative_error: float
    """||v - decode(encode(v))|| / ||v||: what the codec lost of what it was given."""
    residual_ratio: float
    """||e|| / ||Delta||: the error feedback over the averaged pseudo-gradient."""
    cosine: float
    """Between this cluster's pseudo-gradient and the average; 0 where it sent none."""
    shared_digest: str
    """Of theta, independent of the layout; equal on all clusters."""
    tokens_total: int
    leases: Leases
    """After the round."""
