"""Bytes that no dsx sent: refused with ExchangeError, or decoded to a tensor of the right shape.

Nothing else may happen: no other exception, no hang, no allocation beyond the expected tensors.
"""

import random
import zlib
from collections import Counter

import pytest
import torch

from dsx.compression.build import build_codec
from dsx.compression.table import CodecTable
from dsx.compression.wire import FIXED_BYTES, MAGIC, VERSION, pack
from dsx.errors import ExchangeError
from dsx.settings.codec_block import CompressionSettings
from tests.compression.codecs import ALL, name_of

EXPECTED = {"w": (20, 24), "v": (40,), "s": ()}
ROUND = 3


def tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def messages() -> list[bytes]:
    """One about every expected tensor, from every codec."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for codec in ALL:
        for name, shape in EXPECTED.items():
            body = build_codec(codec).encode(name, torch.randn(shape, generator=generator))
            found.append(bytes(pack(name, shape, ROUND, codec, body).numpy()))
    return found


def mutate(message: bytes, chance: random.Random) -> bytes:
    """Flip, overwrite, cut, lengthen or repeat a piece."""
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(data) or 1)
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place : place + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"))
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            data += chance.randbytes(chance.randrange(20))
        elif kind == 4:
            piece = data[place : place + chance.randrange(1, 9)]
            data[place:place] = piece
        else:
            data[place : place + 8] = chance.randbytes(8)
    return bytes(data)


def with_checksum(data: bytes) -> bytes:
    """A header that is right about magic, version and checksum, whatever the rest says."""
    if len(data) < FIXED_BYTES:
        return data
    head = MAGIC + bytes([VERSION]) + data[5 : FIXED_BYTES - 4]
    crc = zlib.crc32(data[FIXED_BYTES:], zlib.crc32(head))
    return head + crc.to_bytes(4, "little") + data[FIXED_BYTES:]


def outcome(table: CodecTable, data: bytes) -> str:
    try:
        for name, value in table.decode(tensor(data), EXPECTED, ROUND):
            assert value.shape == torch.Size(EXPECTED[name])
            assert value.dtype == torch.float32
    except ExchangeError:
        return "refused"
    return "decoded"


@pytest.fixture(scope="module")
def table() -> CodecTable:
    return CodecTable(CompressionSettings())


def test_40000_strings_of_random_bytes_are_refused(table):
    chance = random.Random(1)
    starts = (b"", b"", MAGIC, MAGIC + bytes([VERSION]))
    counts = Counter(
        outcome(table, chance.choice(starts) + chance.randbytes(chance.randrange(1, 200)))
        for _ in range(40_000)
    )
    assert counts == {"refused": 40_000}


def test_30000_damaged_messages_are_refused_unless_damage_made_them_whole_again(table):
    chance = random.Random(2)
    originals = messages()
    for _ in range(30_000):
        message = chance.choice(originals)
        damaged = mutate(message, chance)
        assert outcome(table, damaged) == "refused" or damaged in (message, b"")


def test_30000_damaged_messages_with_a_sound_checksum_do_no_harm(table):
    chance = random.Random(3)
    originals = messages()
    counts = Counter(
        outcome(table, with_checksum(mutate(chance.choice(originals), chance)))
        for _ in range(30_000)
    )
    assert min(counts["refused"], counts["decoded"]) > 1000


@pytest.mark.parametrize("codec", ALL, ids=name_of)
def test_random_bodies_decode_or_are_refused(codec):
    chance = random.Random(4)
    built = build_codec(codec)
    original = bytes(built.encode("w", torch.randn(20, 24)).numpy())
    for _ in range(200):
        data = chance.choice((mutate(original, chance), chance.randbytes(len(original))))
        try:
            decoded = built.decode(tensor(data), (20, 24))
        except ExchangeError:
            continue
        assert decoded.shape == (20, 24)
