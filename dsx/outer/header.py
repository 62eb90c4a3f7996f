"""The first message of every round: who speaks, about what, and from which state."""

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dsx.errors import ExchangeError, ExchangeRefused
from dsx.outer.leases import Ranges
from dsx.settings.dsx_block import OnDivergence

PROTOCOL = 5
LONGEST = 2**16
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
    began: int = Field(ge=0)
    """As `Progress.began`."""
    shared_digest: str
    """Of the sender's shared weights, momentum and leases, over all ranks of the cluster; equal
    wherever `version` is."""
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
    step_samples: int = Field(ge=0)
    """That the sender trains in an inner step."""
    trained: Ranges
    """Samples in the pseudo-gradient."""
    claim: Ranges
    """All samples that the sender has, or goes by; they count where the shared state has no lease
    for it, and nobody else has them."""

    @field_validator("trained", "claim")
    @classmethod
    def _are_ranges(cls, ranges: Ranges) -> Ranges:
        for start, end in ranges:
            if not 0 <= start < end:
                raise ValueError(f"[{start}, {end}) is no range of samples")
        return ranges

    @property
    def version(self) -> tuple[int, int]:
        """Of the sender's shared weights, as `Progress.version`."""
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


def check_headers(headers: list[Header], clusters: tuple[str, ...], own: int) -> None:
    """Refuse to exchange with anybody who trains something else, or in another run.

    Whoever was started afresh and had made rounds of its own before it met the others must neither
    hand them its state nor lose it without a word.

    Args:
        own: this cluster's place among them.

    Raises:
        ExchangeRefused: naming the cluster that differs.
        ExchangeError: the same of clusters in another run, to the one that need not leave: it runs,
            and none of them began before it.
    """
    for name, header in zip(clusters, headers, strict=True):
        if header.protocol != PROTOCOL:
            raise ExchangeRefused(
                f"cluster {name} speaks protocol {header.protocol}, this one {PROTOCOL}; install "
                "the same version of dsx on both"
            )
    # Who has made no round yet takes over whatever the others have.
    begun = [(n, header) for n, header in zip(clusters, headers, strict=True) if header.round]
    oldest = min((header.began for _, header in begun), default=0)
    first = next((pair for pair in begun if pair[1].began == oldest), None)
    other = next((pair for pair in begun if pair[1].began != oldest), None)
    if first is None or other is None:
        return
    leaves = headers[own].round and (headers[own].starting or headers[own].began != oldest)
    raise (ExchangeRefused if leaves else ExchangeError)(
        f"clusters {first[0]} (at round {first[1].round}) and {other[0]} (at round "
        f"{other[1].round}) are of different runs: {other[0]} was started afresh, and made rounds "
        "before it met the other. End the one whose rounds are not wanted, and start it with an "
        "empty dsx.run_dir and dsx.outer.start_clusters at the number of clusters"
    )


def find_newest(
    headers: list[Header], clusters: tuple[str, ...], on_divergence: OnDivergence
) -> tuple[int, list[int]]:
    """Who has the newest shared state, and who takes it over.

    Clusters of one version that hold different states have diverged. With "resync" the state that
    most of them hold goes on, or that of the first where as many hold another.

    Raises:
        ExchangeRefused: some have diverged, and this is to stop the run.
    """
    first: dict[tuple[int, int], int] = {}
    for index, header in enumerate(headers):
        other = first.setdefault(header.version, index)
        if on_divergence == "stop" and header.shared_digest != headers[other].shared_digest:
            raise ExchangeRefused(
                f"clusters {clusters[other]} and {clusters[index]} hold different shared states "
                f"after round {header.round} (digests {headers[other].shared_digest} and "
                f"{header.shared_digest}); start one of them from the other's checkpoint, or set "
                'dsx.outer.on_divergence to "resync"'
            )
    newest = max(header.version for header in headers)
    holders: dict[str, list[int]] = {}
    for index, header in enumerate(headers):
        if header.version == newest:
            holders.setdefault(header.shared_digest, []).append(index)
    most = max(holders.values(), key=len)
    return most[0], [index for index in range(len(headers)) if index not in most]
