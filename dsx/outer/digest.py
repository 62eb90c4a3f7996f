"""Digests by which clusters see that they hold, and talk about, the same thing."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

# Digests are sums of per-tensor hashes, so that they depend neither on the order of the tensors
# nor on how these are spread over stages and replicas. Each part stays far below 2**53, so that
# float64 sums over the ranks of a cluster are exact.
_PARTS = 2
_MODULUS = 2**32


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """This rank's contribution to the digest of named fp32 CPU tensors."""
    sums = [0] * _PARTS
    for name, tensor in tensors.items():
        state = hashlib.blake2b(name.encode() + b"\0", digest_size=4 * _PARTS)
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        state.update(memoryview(raw))  # type: ignore[arg-type]
        digest = state.digest()
        for part in range(_PARTS):
            sums[part] += int.from_bytes(digest[4 * part : 4 * part + 4], "little")
    return [value % _MODULUS for value in sums]


def join_digests(totals: Sequence[float]) -> str:
    """The cluster's digest as hex, from the summed contributions of its ranks."""
    return "".join(f"{int(total) % _MODULUS:08x}" for total in totals)
