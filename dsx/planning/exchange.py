"""Bytes of one round between clusters: what the engine's own codecs and buckets would send."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsx.cluster.ownership import assign_owners
from dsx.compression.table import CodecTable
from dsx.outer.averaging import scatters
from dsx.outer.buckets import buckets
from dsx.outer.pieces import Piece, deal
from dsx.settings.codec_block import CompressionSettings

_HEADER_BYTES = 360
"""Of a round's header, JSON, which each rank sends to its peers; it varies by a few digits."""
_SETTLING_BYTES = 4500
"""Of packets besides, in which each rank meets the others and they vote: measured with two clusters
whose payload was so small that these show (`dsx bench scale --parameters 60k`)."""
_LENGTH_BYTES = 8
"""A payload's length goes before it."""
_SETTLING_ROUNDTRIPS = 3
"""Membership, headers, commit."""


@dataclass(frozen=True)
class Traffic:
    """What one cluster puts on its link in one round; as much comes in."""

    payload: int
    """Encoded tensors, messages' frames included: what `bytes_sent` of a run's metrics counts, but
    for the headers."""
    control: int
    """Headers, lengths, and what it takes to meet and to vote."""
    roundtrips: int
    """Waits of the rank with the most tensors, one latency each way."""

    @property
    def bytes(self) -> int:
        return self.payload + self.control


def round_traffic(
    stages: Sequence[Mapping[str, torch.Size]],
    replicas: int,
    compression: CompressionSettings,
    vocab_size: int,
    clusters: int,
) -> Traffic:
    """One round of `clusters` clusters that all take part.

    Args:
        stages: names and shapes of each stage's tensors, a tied matrix with the first only.
        replicas: of each stage, which share its tensors.
    """
    table = CodecTable(compression, 0, vocab_size)
    scatter = scatters(compression.averaging, clusters)
    payload = messages = most = 0
    for shapes in stages:
        owners = assign_owners({n: s.numel() for n, s in shapes.items()}, replicas)
        for replica in range(replicas):
            owned = {n: s for n, s in shapes.items() if owners[n] == replica}
            swaps = 0
            for names in buckets(owned):
                whole = _bundle(table, owned, names, clusters if scatter else 1)
                payload += _sent(whole, clusters, scatter)
                swaps += 2 if scatter else 1
            messages += swaps
            most = max(most, swaps)
    peers = clusters - 1
    ranks = len(stages) * replicas
    control = ranks * _SETTLING_BYTES
    control += peers * (_HEADER_BYTES * ranks + _LENGTH_BYTES * (messages + ranks))
    return Traffic(payload, control, _SETTLING_ROUNDTRIPS + 2 * most)


def _bundle(
    table: CodecTable, shapes: Mapping[str, torch.Size], names: list[str], owners: int
) -> int:
    """Bytes of all messages about one bucket."""
    shares = [[Piece(name) for name in names]]
    if owners > 1:
        shares = deal(shapes, names, owners, lambda name: table.encodes_rows_apart(shapes[name]))
    return sum(
        table.most_bytes(piece.label, piece.shape(shapes[piece.name]), shapes[piece.name])
        for share in shares
        for piece in share
    )


def _sent(bucket: int, clusters: int, scatter: bool) -> int:
    """Bytes that the average cluster sends of one bucket.

    With owners, each piece goes to its owner from all others, and its mean from there to all of
    them; otherwise everything goes to everybody.
    """
    if scatter:
        return math.ceil(2 * (clusters - 1) * bucket / clusters)
    return (clusters - 1) * bucket
