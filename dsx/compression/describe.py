"""Codecs as a few bytes in a message header: a type, then what decoding needs to know."""

import struct

from dsx.errors import ExchangeError
from dsx.settings.codec_block import (
    Bf16Codec,
    BlockwiseCodec,
    CodecSettings,
    Fp16Codec,
    Int2Codec,
    Int4Codec,
    Int8Codec,
    LowRankCodec,
    NoneCodec,
    QuantizerSettings,
    SignCodec,
    TopKCodec,
)

_FRACTION = struct.Struct("<f")
_NONE, _FP16, _BF16, _INT8, _INT4, _INT2, _SIGN, _TOPK, _LOWRANK, _INT2_MEAN = range(1, 11)
_BLOCKWISE: dict[int, type[Fp16Codec | Int8Codec | Int4Codec | Int2Codec | SignCodec]] = {
    _FP16: Fp16Codec,
    _INT8: Int8Codec,
    _INT4: Int4Codec,
    _INT2: Int2Codec,
    _SIGN: SignCodec,
}
_IDS: dict[type[BlockwiseCodec], int] = {codec: kind for kind, codec in _BLOCKWISE.items()}


def describe(settings: CodecSettings) -> bytes:
    """The description: 1 to 7 bytes."""
    if isinstance(settings, NoneCodec):
        return bytes([_NONE])
    if isinstance(settings, Bf16Codec):
        return bytes([_BF16])
    if isinstance(settings, BlockwiseCodec):
        of_mean = isinstance(settings, Int2Codec) and settings.scale == "mean"
        kind = _INT2_MEAN if of_mean else _IDS[type(settings)]
        return bytes([kind, settings.block.bit_length() - 1])
    if isinstance(settings, TopKCodec):
        return bytes([_TOPK]) + _FRACTION.pack(settings.fraction) + describe(settings.values)
    assert isinstance(settings, LowRankCodec)
    return bytes([_LOWRANK]) + settings.rank.to_bytes(2, "little") + describe(settings.factors)


def understand(description: bytes) -> CodecSettings:
    """The inverse of `describe`; ExchangeError if the bytes describe no codec."""
    kind = description[0] if description else 0
    rest = description[1:]
    if kind == _TOPK and len(rest) > 4:
        (fraction,) = _FRACTION.unpack(rest[:4])
        if 2.0**-20 <= fraction <= 1:
            return TopKCodec(fraction=fraction, values=_understand_quantizer(rest[4:], description))
    if kind == _LOWRANK and len(rest) > 2 and (rank := int.from_bytes(rest[:2], "little")):
        return LowRankCodec(rank=rank, factors=_understand_quantizer(rest[2:], description))
    return _understand_quantizer(description, description)


def _understand_quantizer(part: bytes, description: bytes) -> QuantizerSettings:
    kind = part[0] if part else 0
    if kind == _NONE and len(part) == 1:
        return NoneCodec()
    if kind == _BF16 and len(part) == 1:
        return Bf16Codec()
    if len(part) == 2 and 3 <= part[1] <= 16:
        block = 1 << part[1]
        if kind == _INT2_MEAN:
            return Int2Codec(block=block, scale="mean")
        if kind in _BLOCKWISE:
            return _BLOCKWISE[kind](block=block)
    raise ExchangeError(
        f"a message names a codec that this version of dsx does not know "
        f"(0x{description.hex()}); run the same version on all clusters"
    )
