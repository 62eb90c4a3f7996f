"""The codecs of the `"dsx"` block: how each kind of tensor travels between clusters.

A codec is an object with a `type`, or, as shorthand, the type alone: `"int4"` is
`{"type": "int4", "block": 128}`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from dsx.settings.base import Block


class NoneCodec(Block):
    """fp32 as it is: loses nothing."""

    type: Literal["none"] = "none"


class Bf16Codec(Block):
    """bfloat16: fp32 with 8 significant bits, no scale."""

    type: Literal["bf16"] = "bf16"


class BlockwiseCodec(Block):
    """Base of the codecs that share a scale in each block."""

    block: int = Field(
        128, ge=8, le=65536, description="Entries that share a scale; a power of two."
    )

    @field_validator("block")
    @classmethod
    def _power_of_two(cls, block: int) -> int:
        if block & (block - 1):
            raise ValueError(f"`block` is {block}; use a power of two from 8 to 65536")
        return block


class Fp16Codec(BlockwiseCodec):
    """IEEE half precision of the entry over its block's largest magnitude."""

    type: Literal["fp16"] = "fp16"


class Int8Codec(BlockwiseCodec):
    """255 levels between the block's largest magnitude and its negative."""

    type: Literal["int8"] = "int8"


class Int4Codec(BlockwiseCodec):
    """15 levels between the block's largest magnitude and its negative."""

    type: Literal["int4"] = "int4"


class Int2Codec(BlockwiseCodec):
    """Four levels: -1, -1/3, 1/3 and 1 times the outermost."""

    type: Literal["int2"] = "int2"
    scale: Literal["absmax", "mean"] = Field(
        "absmax",
        description="The outermost level: the block's largest magnitude (no entry is clipped), or "
        "twice their mean (a relative error of 0.35 instead of 0.55 on normal values; what is "
        "clipped is left to the error feedback).",
    )


class SignCodec(BlockwiseCodec):
    """One bit: the sign, times the mean of the block's absolute values."""

    type: Literal["sign"] = "sign"


_QuantizerUnion = NoneCodec | Fp16Codec | Bf16Codec | Int8Codec | Int4Codec | Int2Codec | SignCodec


def _expand_shorthand(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


QuantizerSettings = Annotated[
    _QuantizerUnion, Field(discriminator="type"), BeforeValidator(_expand_shorthand)
]
"""A codec that treats entries alike: what `topk` sends its values with, `lowrank` its factors."""


class TopKCodec(Block):
    """Only the entries of largest magnitude, with their places (SparseLoCo, arXiv 2508.15706)."""

    type: Literal["topk"] = "topk"
    fraction: float = Field(
        0.1, ge=2.0**-20, le=1, description="Share of the entries that is sent."
    )
    values: QuantizerSettings = Field(
        default_factory=SignCodec, description="How the values of those entries are sent."
    )


class LowRankCodec(Block):
    """Two factors of low rank (PowerSGD, arXiv 1905.13727); needs error feedback."""

    type: Literal["lowrank"] = "lowrank"
    rank: int = Field(..., ge=1, le=65535, description="Columns of each factor.")
    factors: QuantizerSettings = Field(
        default_factory=Int4Codec,
        description="How the factors are sent, and whatever low rank would not make smaller.",
    )


CodecSettings = Annotated[
    _QuantizerUnion | TopKCodec | LowRankCodec,
    Field(discriminator="type"),
    BeforeValidator(_expand_shorthand),
]
"""Any codec."""


class CompressionSettings(Block):
    """What the pseudo-gradients are encoded with, and how they are averaged."""

    matrices: CodecSettings = Field(
        default_factory=TopKCodec, description="Codec of matrices other than the embeddings."
    )
    embeddings: CodecSettings = Field(
        default_factory=TopKCodec, description="Codec of vocabulary-sized matrices."
    )
    vectors: CodecSettings = Field(
        default_factory=Bf16Codec, description="Codec of norms, biases and scalars."
    )
    feedback_decay: float = Field(
        1.0, ge=0, le=1, description="Share of the encoding error added to the next round's update."
    )
    averaging: Literal["auto", "gather", "scatter"] = Field(
        "auto",
        description="Everyone gets everyone's bytes (`gather`), or owners average chunks and "
        "encode them again (`scatter`); `auto` takes the cheaper for the number of clusters.",
    )
