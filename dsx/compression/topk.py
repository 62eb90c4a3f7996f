"""Sending only the entries of largest magnitude, with their places."""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.compression.codec import Stateless, to_overwrite, written_back
from dsx.compression.dense import Dense
from dsx.compression.elias_fano import decode_indices, encode_indices, encoded_bytes
from dsx.compression.quantizers import Quantizer
from dsx.errors import ExchangeError
from dsx.settings.codec_block import TopKCodec

_COUNT_BYTES = 8
_SAMPLE = 1 << 16
"""Entries from which the threshold of the largest is guessed."""


class TopK(Stateless):
    """The `fraction` of entries that are largest in magnitude, over the whole tensor.

    Body: their number, u64; their places (`dsx.compression.elias_fano`); their values in the
    order of places, by the quantizer. Zeros are never sent. A tensor for which this might take
    more bytes than all entries by the same quantizer is sent as the latter.
    """

    def __init__(self, settings: TopKCodec, values: Quantizer) -> None:
        self._settings = settings
        self._values = values
        self._dense = Dense(settings.values, values)
        # As a message carries it, so that reader and writer count alike.
        self._fraction: float = struct.unpack("<f", struct.pack("<f", settings.fraction))[0]

    @property
    def settings(self) -> TopKCodec:
        return self._settings

    def encode(self, name: str, value: Tensor) -> Tensor:
        if not self._is_sparse(value.shape):
            return self._dense.encode(name, value)
        flat = value.reshape(-1)
        places = self._largest(flat)
        return self._join(places, self._values.encode(flat[places]), flat.numel())

    def encode_with_residual(
        self, name: str, value: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self._is_sparse(value.shape):
            return self._dense.encode_with_residual(name, value, overwrite)
        target, flat = to_overwrite(value, overwrite)
        places = self._largest(flat)
        kept = flat[places]
        body = self._join(places, self._values.encode(kept, overwrite=True), flat.numel())
        flat[places] = kept
        return body, written_back(flat, target)

    def decode(self, body: Tensor, shape: Sequence[int], out: Tensor | None = None) -> Tensor:
        if not self._is_sparse(shape):
            return self._dense.decode(body, shape, out)
        entries = math.prod(shape)
        kept = int.from_bytes(bytes(body[:_COUNT_BYTES].numpy()), "little")
        if body.numel() < _COUNT_BYTES or kept > self._kept(entries):
            raise ExchangeError(
                f"a sparse tensor of {entries} entries claims that {kept} of them were sent, but "
                f"at most {self._kept(entries)} can be: the message is damaged"
            )
        start = _COUNT_BYTES + encoded_bytes(entries, kept)
        places = decode_indices(body[_COUNT_BYTES:start].numpy(), entries, kept)
        values = self._values.decode(body[start:], kept)
        out = torch.zeros(tuple(shape)) if out is None else out.zero_()
        out.view(-1)[torch.from_numpy(places)] = values
        return out

    def most_bytes(self, shape: Sequence[int]) -> int:
        if self._is_sparse(shape):
            return self._sparse_bytes(math.prod(shape))
        return self._dense.most_bytes(shape)

    def _kept(self, entries: int) -> int:
        return min(entries, max(1, round(self._fraction * entries)))

    def _sparse_bytes(self, entries: int) -> int:
        kept = self._kept(entries)
        return _COUNT_BYTES + encoded_bytes(entries, kept) + self._values.body_bytes(kept)

    def _is_sparse(self, shape: Sequence[int]) -> bool:
        entries = math.prod(shape)
        return entries > 0 and self._sparse_bytes(entries) < self._dense.most_bytes(shape)

    def _join(self, places: Tensor, values: Tensor, entries: int) -> Tensor:
        count = torch.tensor([places.numel()], dtype=torch.int64).view(torch.uint8)
        indices = torch.from_numpy(encode_indices(places.cpu().numpy(), entries))
        return torch.cat([count, indices, values])

    def _largest(self, flat: Tensor) -> Tensor:
        """Places (int64, ascending) of the largest entries that are not zero."""
        kept = self._kept(flat.numel())
        candidates = self._candidates(flat, kept)
        magnitudes = (flat if candidates is None else flat[candidates]).abs()
        best = magnitudes.topk(kept, sorted=False).indices.sort().values
        places = best if candidates is None else candidates[best]
        return places[flat[places] != 0]

    def _candidates(self, flat: Tensor, kept: int) -> Tensor | None:
        """Places of somewhat more than `kept` entries, the largest among them; None: of all.

        A threshold from a sample spares selecting among all entries; it lies low enough to let
        the wanted ones through but for rare samples, which the count then tells.
        """
        stride = flat.numel() // _SAMPLE
        if stride < 8:
            return None
        sample = flat[::stride].abs().float()
        share = kept / flat.numel() * sample.numel()
        rank = math.ceil(share + 4 * math.sqrt(share) + 4)
        if 2 * rank > sample.numel():
            return None
        threshold = sample.topk(rank).values[-1]
        candidates = torch.nonzero((flat >= threshold) | (flat <= -threshold)).squeeze(1)
        return candidates if kept <= candidates.numel() <= flat.numel() // 2 else None
