"""Tensors in pieces that fill a slow link and still fit the host's memory."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from dsx.errors import ExchangeError

# Large enough to fill a slow link, small enough that a model many times the size of this passes
# through the host's memory piece by piece.
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
