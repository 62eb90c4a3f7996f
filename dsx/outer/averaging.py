"""The weighted mean of the clusters' pseudo-gradients, the same bits on every cluster."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from dsx.errors import ExchangeError
from dsx.exchange.interface import Exchange, gather

# Large enough to fill a slow link, small enough that a model many times the size of this
# passes through the host's memory piece by piece.
_BUCKET_BYTES = 64 * 2**20


def buckets(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    """The names in order, cut into runs of at most 64 MiB of fp32 (or one larger tensor)."""
    bucket: list[str] = []
    size = 0
    for name, shape in shapes.items():
        bytes_ = 4 * shape.numel()
        if bucket and size + bytes_ > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += bytes_
    if bucket:
        yield bucket


def pack(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    """The named fp32 tensors one after the other, as uint8, 1-D."""
    return torch.cat([tensors[name].reshape(-1) for name in names]).view(torch.uint8)


def unpack(
    payload: torch.Tensor, shapes: Mapping[str, torch.Size], names: Sequence[str], sender: str
) -> dict[str, torch.Tensor]:
    """The inverse of `pack`; raises ExchangeError when the length is not that of `names`."""
    expected = sum(4 * shapes[name].numel() for name in names)
    if payload.numel() != expected:
        raise ExchangeError(
            f"cluster {sender} sent {payload.numel()} bytes for {len(names)} tensors of "
            f"{expected} bytes"
        )
    flat = payload.view(torch.float32)
    pieces = flat.split([shapes[name].numel() for name in names])
    return {name: piece.view(shapes[name]) for name, piece in zip(names, pieces, strict=True)}


def average(
    exchange: Exchange,
    clusters: Sequence[str],
    shares: Sequence[float],
    delta: Mapping[str, torch.Tensor] | None,
    shapes: Mapping[str, torch.Size],
) -> dict[str, torch.Tensor]:
    """`Delta = sum_c w_c delta_c`, summed in member order.

    Args:
        clusters: the members' names.
        shares: w_c per member; a member of share 0 sends nothing and receives the average.
        delta: own pseudo-gradient, fp32 on the CPU; None where the own share is 0.
        shapes: names and shapes of the outer group's tensors.
    """
    result: dict[str, torch.Tensor] = {}
    nothing = torch.empty(0, dtype=torch.uint8)
    for names in buckets(shapes):
        payload = nothing if delta is None else pack(delta, names)
        received = gather(exchange, len(clusters), payload)
        total: dict[str, torch.Tensor] = {}
        for cluster, share, message in zip(clusters, shares, received, strict=True):
            if share == 0:
                continue
            for name, value in unpack(message, shapes, names, cluster).items():
                if name in total:
                    total[name].add_(value, alpha=share)
                else:
                    total[name] = value * share
        result.update(total)
    return result
