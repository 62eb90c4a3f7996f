"""Sets of indices in close to as few bits as possible (Elias 1974, Fano 1971).

`count` indices below `limit`, in ascending order: the lowest l = floor(log2(limit / count)) bits
of each are stored as they are; the rest, which grows slowly, as a bitmap in which index number i
sets bit (index >> l) + i. That is at most l + 2 bits an index (7 at 3 %, where plain indices within
chunks of 4,096 take 12 and the entropy is 6.5), of a length that follows from the two numbers.
"""

import numpy as np
import numpy.typing as npt

from dsx.errors import ExchangeError

Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def _low_bits(limit: int, count: int) -> int:
    return max(0, (limit // count).bit_length() - 1)


def _sizes(limit: int, count: int) -> tuple[int, int, int]:
    """(low bits of an index, bytes for all low bits, bits of the bitmap)."""
    low = _low_bits(limit, count)
    return low, -(-count * low // 8), count + ((limit - 1) >> low)


def encoded_bytes(limit: int, count: int) -> int:
    """Length of what `encode_indices` returns."""
    if count == 0:
        return 0
    _, low_bytes, high_bits = _sizes(limit, count)
    return low_bytes + -(-high_bits // 8)


def encode_indices(indices: Indices, limit: int) -> Bytes:
    """The bytes that stand for `indices`: strictly ascending, from 0 to limit - 1."""
    count = len(indices)
    if count == 0:
        return np.empty(0, dtype=np.uint8)
    low, _, high_bits = _sizes(limit, count)
    parts = indices.astype("<u8").view(np.uint8).reshape(count, 8)
    bits = np.unpackbits(parts, axis=1, count=low, bitorder="little")
    bitmap = np.zeros(high_bits, dtype=np.uint8)
    bitmap[(indices >> low) + np.arange(count)] = 1
    return np.concatenate(
        [np.packbits(bits, bitorder="little"), np.packbits(bitmap, bitorder="little")]
    )


def decode_indices(data: Bytes, limit: int, count: int) -> Indices:
    """The inverse.

    Raises:
        ExchangeError: `data` stands for no `count` ascending indices below `limit`.
    """
    if len(data) != encoded_bytes(limit, count):
        raise ExchangeError(
            f"{count} indices below {limit} take {encoded_bytes(limit, count)} bytes, but "
            f"{len(data)} came: the message is damaged"
        )
    if count == 0:
        return np.empty(0, dtype=np.int64)
    low, low_bytes, high_bits = _sizes(limit, count)
    places = np.flatnonzero(np.unpackbits(data[low_bytes:], count=high_bits, bitorder="little"))
    if len(places) != count:
        raise ExchangeError(f"{count} indices were due, but {len(places)} came: damaged message")
    indices = (places - np.arange(count)) << low
    if low:
        bits = np.unpackbits(data[:low_bytes], count=count * low, bitorder="little")
        padded = np.zeros((count, 64), dtype=np.uint8)
        padded[:, :low] = bits.reshape(count, low)
        indices |= np.packbits(padded, bitorder="little").view("<i8")
    if indices[-1] >= limit or np.any(indices[1:] <= indices[:-1]):
        raise ExchangeError(f"indices are not ascending or not below {limit}: damaged message")
    return indices
