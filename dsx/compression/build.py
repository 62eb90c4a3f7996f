"""How settings become codecs."""

from dsx.compression.codec import Codec
from dsx.compression.dense import Dense
from dsx.compression.levels import INT2, INT2_MEAN, INT4, INT8, SIGN
from dsx.compression.lowrank import LowRank
from dsx.compression.quantizers import Bf16, Blockwise, Fp16, Fp32, Quantizer
from dsx.compression.topk import TopK
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

_LEVELS = {Int8Codec: INT8, Int4Codec: INT4, Int2Codec: INT2, SignCodec: SIGN}


def build_quantizer(settings: QuantizerSettings, compiled: bool = False) -> Quantizer:
    """The quantizer that `settings` describe; `compiled` as in `Blockwise`."""
    if isinstance(settings, Fp16Codec):
        return Fp16(settings.block)
    if isinstance(settings, BlockwiseCodec):
        of_mean = isinstance(settings, Int2Codec) and settings.scale == "mean"
        levels = INT2_MEAN if of_mean else _LEVELS[type(settings)]
        return Blockwise(levels, settings.block, compiled)
    if isinstance(settings, Bf16Codec):
        return Bf16()
    assert isinstance(settings, NoneCodec)
    return Fp32()


def build_codec(settings: CodecSettings, seed: int = 0, compiled: bool = False) -> Codec:
    """The codec that `settings` describe.

    Args:
        settings: Any codec of `dsx.settings.codec_block`.
        seed: The run's seed; `lowrank` derives its first subspaces from it.
        compiled: Use `torch.compile` where it makes a difference (large tensors of the integer
            codecs). The bytes are the same.
    """
    if isinstance(settings, TopKCodec):
        return TopK(settings, build_quantizer(settings.values, compiled))
    if isinstance(settings, LowRankCodec):
        return LowRank(settings, build_quantizer(settings.factors, compiled), seed)
    return Dense(settings, build_quantizer(settings, compiled))
