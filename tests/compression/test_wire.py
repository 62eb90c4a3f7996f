"""Messages: what comes through, and that nothing else does."""

import zlib

import pytest
import torch

from dsx.compression.table import CodecTable, kind_of
from dsx.compression.wire import VERSION, header_bytes, pack, read_bundle, read_message
from dsx.errors import ExchangeError
from dsx.settings.codec_block import CompressionSettings, Int4Codec

EXPECTED = {"layers.0.weight": (24, 40), "norm": (40,), "scale": ()}


def make_table(kind: str = "int4") -> CodecTable:
    return CodecTable(CompressionSettings(matrices=kind, embeddings=kind, vectors="none"))


def make_bundle(table: CodecTable, round_: int = 7) -> torch.Tensor:
    return torch.cat(
        [table.encode(name, torch.randn(shape), round_) for name, shape in EXPECTED.items()]
    )


def patched(message: torch.Tensor, place: int, data: bytes) -> torch.Tensor:
    """`message` with other bytes at `place` and a checksum that fits them."""
    raw = bytearray(message.numpy().tobytes())
    raw[place : place + len(data)] = data
    raw[21:25] = zlib.crc32(bytes(raw[25:]), zlib.crc32(bytes(raw[:21]))).to_bytes(4, "little")
    return torch.frombuffer(raw, dtype=torch.uint8)


def test_a_bundle_gives_its_tensors_back_by_name():
    table = make_table()
    values = {name: torch.randn(shape) for name, shape in EXPECTED.items()}
    bundle = torch.cat([table.encode(name, value, 7) for name, value in values.items()])
    decoded = dict(table.decode(bundle, EXPECTED, 7))
    assert list(decoded) == list(EXPECTED)
    assert decoded["norm"].equal(values["norm"])
    assert decoded["scale"].equal(values["scale"])
    assert (decoded["layers.0.weight"] - values["layers.0.weight"]).abs().max() < 0.5


def test_a_message_says_what_it_holds():
    body = torch.arange(6, dtype=torch.uint8)
    message = pack("größe", (3, 4), 12, Int4Codec(block=64), body)
    assert message.numel() == header_bytes("größe", (3, 4), Int4Codec()) + 6
    read = read_message(message, {"größe": (3, 4)}, 12)
    assert (read.name, read.shape, read.round) == ("größe", (3, 4), 12)
    assert read.codec == Int4Codec(block=64)
    assert read.body.equal(body)


def test_decoding_uses_the_senders_codec_not_the_own_one():
    value = torch.randn(24, 40)
    message = make_table("int8").encode("layers.0.weight", value, 1)
    ((_, decoded),) = make_table("sign").decode(message, EXPECTED, 1)
    assert (decoded - value).norm() < 0.01 * value.norm()


def test_every_truncation_is_refused():
    message = make_table().encode("norm", torch.randn(40), 1)
    for length in range(1, message.numel()):
        with pytest.raises(ExchangeError, match="truncated"):
            read_message(message[:length], EXPECTED, 1)


def test_every_flipped_bit_is_refused():
    message = make_table().encode("layers.0.weight", torch.randn(24, 40), 1)
    for bit in range(8 * message.numel()):
        damaged = message.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ExchangeError):
            read_message(damaged, EXPECTED, 1)


@pytest.mark.parametrize(
    ("place", "data", "complaint"),
    [
        (0, b"HTTP", "no dsx message"),
        (4, bytes([VERSION - 1]), "wire format"),
        (4, bytes([VERSION + 1]), "wire format"),
        (8, (6).to_bytes(4, "little"), "round 6"),
        (25, b"\xee", "codec"),
        (26, b"\xee", "codec"),
        (27, b"L", "not expected"),
        (42, (25).to_bytes(8, "little"), "has shape"),
    ],
)
def test_a_message_with_a_sound_checksum_but_foreign_content_is_refused(place, data, complaint):
    message = make_table().encode("layers.0.weight", torch.randn(24, 40), 7)
    assert patched(message, 0, b"DSXM").equal(message)
    with pytest.raises(ExchangeError, match=complaint):
        read_message(patched(message, place, data), EXPECTED, 7)


def test_a_tensor_comes_once_in_a_bundle():
    message = make_table().encode("norm", torch.randn(40), 7)
    with pytest.raises(ExchangeError, match="two messages"):
        list(read_bundle(torch.cat([message, message]), EXPECTED, 7))
    with pytest.raises(ExchangeError, match="holds 0"):
        read_message(message[:0], EXPECTED, 7)


def test_sound_messages_before_a_damaged_one_are_handed_out():
    bundle = make_bundle(make_table())
    bundle[-1] ^= 1
    messages = read_bundle(bundle, EXPECTED, 7)
    assert [next(messages).name, next(messages).name] == ["layers.0.weight", "norm"]
    with pytest.raises(ExchangeError, match="checksum"):
        next(messages)


def test_tensors_are_sorted_into_kinds_by_shape():
    assert kind_of((), 512) == "vectors"
    assert kind_of((512,), 512) == "vectors"
    assert kind_of((512, 64), 512) == "embeddings"
    assert kind_of((64, 512), 512) == "matrices"
    assert kind_of((512, 64), None) == "matrices"
    assert kind_of((4, 64, 64), 512) == "matrices"


def test_each_kind_of_tensor_has_its_own_codec():
    table = CodecTable(
        CompressionSettings(matrices="int4", embeddings="sign", vectors="bf16"), vocab_size=512
    )
    chosen = [table.codec_for("w", shape).settings.type for shape in [(64, 8), (512, 8), (8,)]]
    assert chosen == ["int4", "sign", "bf16"]
