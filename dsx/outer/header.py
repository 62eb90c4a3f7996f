"""The first message of every round: who speaks, about what, and from which state."""

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsx.errors import ExchangeError, ExchangeRefused

PROTOCOL = 3
LONGEST = 4096
"""Bytes of a header, at most."""


class Header(BaseModel):
    """What every rank of a cluster tells its outer group before the payload."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    protocol: int = PROTOCOL
    identity: str
    """Digest of settings, names and shapes; must be equal everywhere."""
    round: int = Field(ge=0)
    """Rounds committed so far."""
    met: int = Field(ge=0)
    """Number of the meeting at which the last of them was committed."""
    shared_digest: str
    """Of the sender's shared weights and momentum; equal wherever `version` is."""
    starting: bool
    """The sender has no pseudo-gradient yet: it starts, or has just come."""
    tokens: int = Field(ge=0)
    """Tokens trained into the pseudo-gradient: its weight in the average."""
    step_seconds: float = Field(ge=0)
    exchange_seconds: float = Field(ge=0)
    measured_rank: float = Field(ge=0)
    """What the rank rule saw in the sender's last round; 0: nothing."""
    step: int = Field(ge=0)
    """Inner step of the run at which the pseudo-gradient was taken."""

    @property
    def version(self) -> tuple[int, int]:
        """Of the sender's shared weights: who has the greatest has the newest.

        Clusters that were cut off from each other may have committed the same round with different
        members. The one that met later was the one that the coordinator could still reach.
        """
        return self.round, self.met

    def to_bytes(self) -> torch.Tensor:
        """As uint8, 1-D, on the CPU."""
        return torch.frombuffer(bytearray(self.model_dump_json().encode()), dtype=torch.uint8)

    @staticmethod
    def from_bytes(payload: torch.Tensor, sender: str) -> "Header":
        """Raises ExchangeError when the bytes are no header of this protocol."""
        if payload.numel() > LONGEST:
            raise ExchangeError(
                f"cluster {sender} sent a header of {payload.numel()} bytes; at most {LONGEST} "
                "are read: does it run another version of dsx?"
            )
        try:
            return Header.model_validate_json(bytes(payload.numpy()))
        except ValidationError as error:
            raise ExchangeError(
                f"cluster {sender} sent no header of protocol {PROTOCOL}: {error}"
            ) from error


def check_headers(headers: list[Header], clusters: tuple[str, ...]) -> None:
    """Refuse to exchange with anybody who trains something else.

    Raises:
        ExchangeRefused: naming the cluster that differs.
    """
    for name, header in zip(clusters, headers, strict=True):
        if header.protocol != PROTOCOL:
            raise ExchangeRefused(
                f"cluster {name} speaks protocol {header.protocol}, this one {PROTOCOL}; install "
                "the same version of dsx on both"
            )
    digests: dict[tuple[int, int], tuple[str, str]] = {}
    for name, header in zip(clusters, headers, strict=True):
        first, digest = digests.setdefault(header.version, (name, header.shared_digest))
        if digest != header.shared_digest:
            raise ExchangeRefused(
                f"clusters {first} and {name} hold different shared weights after round "
                f"{header.round} (digests {digest} and {header.shared_digest}); start one of them "
                "from the other's checkpoint"
            )
