"""Codecs as a few bytes in a message header: a type, then what decoding needs to know."""

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

_NONE, _FP16, _BF16, _INT8, _INT4, _INT2, _SIGN, _TOPK, _LOWRANK = range(1, 10)
_BLOCKWISE: dict[int, type[BlockwiseCodec]] = {
    _FP16: Fp16Codec,
    _INT8: Int8Codec,
    _INT4: Int4Codec,
    _INT2: Int2Codec,
    _SIGN: SignCodec,
}
_IDS = {codec: number for number, codec in _BLOCKWISE.items()}


def describe(settings: CodecSettings) -> bytes:
    """The description: 1 to 5 bytes. `topk`'s fraction is left out, decoding does not need it."""
    if isinstance(settings, NoneCodec):
        return bytes([_NONE])
    if isinstance(settings, Bf16Codec):
        return bytes([_BF16])
    if isinstance(settings, BlockwiseCodec):
        return bytes([_IDS[type(settings)], settings.block.bit_length() - 1])
    if isinstance(settings, TopKCodec):
        return bytes([_TOPK]) + describe(settings.values)
    assert isinstance(settings, LowRankCodec)
    return bytes([_LOWRANK]) + settings.rank.to_bytes(2, "little") + describe(settings.factors)


def understand(description: bytes) -> CodecSettings:
    """The inverse of `describe`; ExchangeError if the bytes describe no codec."""
    kind = description[0] if description else 0
    rest = description[1:]
    if kind == _TOPK:
        return TopKCodec(fraction=1.0, values=_understand_quantizer(rest, description))
    if kind == _LOWRANK and len(rest) > 2 and (rank := int.from_bytes(rest[:2], "little")):
        return LowRankCodec(rank=rank, factors=_understand_quantizer(rest[2:], description))
    return _understand_quantizer(description, description)


def _understand_quantizer(part: bytes, description: bytes) -> QuantizerSettings:
    kind = part[0] if part else 0
    if kind == _NONE and len(part) == 1:
        return NoneCodec()
    if kind == _BF16 and len(part) == 1:
        return Bf16Codec()
    if kind in _BLOCKWISE and len(part) == 2 and 3 <= part[1] <= 16:
        return _BLOCKWISE[kind](block=1 << part[1])  # type: ignore[return-value]
    raise ExchangeError(
        f"a message names a codec that this version of dsx does not know "
        f"(0x{description.hex()}); run the same version on all clusters"
    )
