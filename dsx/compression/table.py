"""One codec for each tensor, and whole messages instead of bodies."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from dsx.compression.build import build_codec
from dsx.compression.codec import Codec
from dsx.compression.lowrank import LowRank
from dsx.compression.wire import Message, header_bytes, pack, read_bundle
from dsx.errors import ExchangeError
from dsx.settings.codec_block import CompressionSettings

Kind = str
"""A field of CompressionSettings: "matrices", "embeddings" or "vectors"."""


def kind_of(shape: Sequence[int], vocab_size: int | None) -> Kind:
    """What sort of tensor it is: embedding and head are the matrices with a row per token."""
    if len(shape) < 2:
        return "vectors"
    if len(shape) == 2 and shape[0] == vocab_size:
        return "embeddings"
    return "matrices"


class CodecTable:
    """The codecs of a run: encodes tensors to messages, decodes anybody's messages.

    Args:
        settings: Codec by kind of tensor.
        seed: The run's seed.
        vocab_size: Rows of the embedding matrix; None where there is none.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        seed: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._codecs: dict[Kind, Codec] = {
            kind: build_codec(getattr(settings, kind), seed)
            for kind in ("matrices", "embeddings", "vectors")
        }
        self._staged: dict[str, Codec] = {}

    def codec_for(self, name: str, shape: Sequence[int]) -> Codec:
        """The codec that encodes this tensor."""
        return self._codecs[kind_of(shape, self._vocab_size)]

    def encodes_rows_apart(self, shape: Sequence[int]) -> bool:
        """Whether such a tensor may be encoded in pieces: low rank looks at whole matrices."""
        return not isinstance(self._codecs[kind_of(shape, self._vocab_size)], LowRank)

    def most_bytes(
        self, name: str, shape: Sequence[int], whole: Sequence[int] | None = None
    ) -> int:
        """Length of the longest message about such a tensor, or about such rows of `whole`."""
        codec = self.codec_for(name, shape if whole is None else whole)
        return header_bytes(name, shape, codec.settings) + codec.most_bytes(shape)

    def set_rank(self, rank: int) -> None:
        """Use another rank from the next encoding on, wherever the codec is of low rank."""
        for codec in self._codecs.values():
            if isinstance(codec, LowRank):
                codec.set_rank(rank)

    def encode(self, name: str, value: Tensor, round_: int) -> Tensor:
        """The message about `value` (fp32 or bf16, finite): uint8, 1-D, on the CPU."""
        codec = self.codec_for(name, value.shape)
        self._staged[name] = codec
        return pack(name, value.shape, round_, codec.settings, codec.encode(name, value))

    def encode_with_residual(
        self,
        name: str,
        value: Tensor,
        round_: int,
        overwrite: bool = False,
        whole: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The message, and `value - decoded`, over `value` with `overwrite`, as a codec does.

        `whole`: the shape of the tensor that `value` is some rows of, which chooses the codec.
        """
        codec = self.codec_for(name, value.shape if whole is None else whole)
        self._staged[name] = codec
        body, residual = codec.encode_with_residual(name, value, overwrite)
        return pack(name, value.shape, round_, codec.settings, body), residual

    def decode(
        self, bundle: Tensor, expected: Mapping[str, Sequence[int]], round_: int
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, fp32 CPU tensor) of one message of `bundle` after the other.

        Raises:
            ExchangeError: as `read_bundle`, when the next message can't be used; also when a body
                does not fit what its message says.
        """
        for message in read_bundle(bundle, expected, round_):
            yield message.name, self.decode_message(message)

    def decode_message(self, message: Message, out: Tensor | None = None) -> Tensor:
        """The fp32 CPU tensor that a message holds, in `out` if given (of its shape).

        Raises:
            ExchangeError: the body is unsound; `out` then holds anything.
        """
        codec = build_codec(message.codec)
        return codec.decode(message.body, message.shape, out)

    def commit(self) -> None:
        """The round counts: codecs take over what they learnt from the last encodings."""
        for name, codec in self._staged.items():
            codec.commit(name)
        self._staged = {}

    def discard(self) -> None:
        """The round does not count."""
        for name, codec in self._staged.items():
            codec.discard(name)
        self._staged = {}

    def state_dict(self) -> dict[str, Tensor]:
        """All codecs' state, keys prefixed with the kind of tensor."""
        return {
            f"{kind}/{name}": value
            for kind, codec in self._codecs.items()
            for name, value in codec.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` of a table with the same settings gave."""
        unknown = [key for key in state if key.partition("/")[0] not in self._codecs]
        if unknown:
            raise ExchangeError(f"no codec has a state like {unknown[0]!r}")
        for kind, codec in self._codecs.items():
            prefix = f"{kind}/"
            codec.load_state_dict(
                {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
            )
