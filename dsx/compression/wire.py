"""The wire format of encoded tensors: self-describing messages, and bundles of them.

A message, little-endian:

    magic "DSXM" | version u8 | codec length u8 | name length u16 | round u32 | dimensions u8 |
    body length u64 | CRC-32 u32 | codec | name (UTF-8) | dimensions x u64 | body

The CRC covers everything but itself. A bundle is messages, one after the other. Whoever reads
knows which tensors to expect: a message about anything else is refused before its body is looked
at, so that no memory beyond that of the expected tensors is ever allocated.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsx.compression.describe import describe, understand
from dsx.errors import ExchangeError
from dsx.settings.codec_block import CodecSettings

MAGIC = b"DSXM"
VERSION = 1
_HEAD = struct.Struct("<4sBBHIBQ")
_CRC = struct.Struct("<I")
FIXED_BYTES = _HEAD.size + _CRC.size
"""Bytes of a message besides codec, name, dimensions and body."""


@dataclass(frozen=True)
class Message:
    """One encoded tensor, whole and undamaged."""

    name: str
    shape: tuple[int, ...]
    round: int
    codec: CodecSettings
    body: Tensor
    """uint8, 1-D, on the CPU; a view of what was read."""


def header_bytes(name: str, shape: Sequence[int], codec: CodecSettings) -> int:
    """Length of a message of an empty body."""
    return FIXED_BYTES + len(describe(codec)) + len(name.encode()) + 8 * len(shape)


def pack(
    name: str, shape: Sequence[int], round_: int, codec: CodecSettings, body: Tensor
) -> Tensor:
    """One message (uint8, 1-D, CPU) around `body` (the same kind of tensor)."""
    description, label = describe(codec), name.encode()
    dimensions = struct.pack(f"<{len(shape)}Q", *shape)
    head = _HEAD.pack(
        MAGIC, VERSION, len(description), len(label), round_, len(shape), body.numel()
    )
    variable = description + label + dimensions
    start = FIXED_BYTES + len(variable)
    message = torch.empty(start + body.numel(), dtype=torch.uint8)
    message[start:].copy_(body)
    view = memoryview(message.numpy())  # type: ignore[arg-type]
    crc = zlib.crc32(view[start:], zlib.crc32(variable, zlib.crc32(head)))
    view[:start] = head + _CRC.pack(crc) + variable
    return message


def read_bundle(
    bundle: Tensor, expected: Mapping[str, Sequence[int]], round_: int
) -> Iterator[Message]:
    """The messages of `bundle`, each checked before it is handed out.

    Args:
        bundle: uint8, 1-D, on the CPU.
        expected: Shapes by name of the tensors that may occur, each at most once.
        round_: The round that all messages must be of.

    Raises:
        ExchangeError: when the next message is truncated, damaged, foreign, of another version
            or round, unexpected or repeated.
    """
    seen: set[str] = set()
    position = 0
    view = memoryview(bundle.contiguous().numpy())  # type: ignore[arg-type]
    while position < len(view):
        message, position = _read(view, position, expected)
        if message.round != round_:
            raise ExchangeError(
                f"a message about {message.name} is of round {message.round}, but this is round "
                f"{round_}: it came late or from a cluster that is out of step"
            )
        if message.name in seen:
            raise ExchangeError(f"a bundle holds two messages about {message.name}")
        seen.add(message.name)
        yield message


def read_message(message: Tensor, expected: Mapping[str, Sequence[int]], round_: int) -> Message:
    """The only message of a bundle; raises as `read_bundle`, or if there is not exactly one."""
    messages = list(read_bundle(message, expected, round_))
    if len(messages) != 1:
        raise ExchangeError(f"one message was due, but the bundle holds {len(messages)}")
    return messages[0]


def _read(
    view: memoryview, position: int, expected: Mapping[str, Sequence[int]]
) -> tuple[Message, int]:
    left = len(view) - position
    if left < FIXED_BYTES:
        raise _truncated(position, FIXED_BYTES, left)
    head = view[position : position + _HEAD.size]
    magic, version, codec_length, name_length, round_, dimensions, body_length = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ExchangeError(
            f"byte {position} of a bundle starts no dsx message ({bytes(magic)!r} instead of "
            f"{MAGIC!r}): it is damaged, or something else than dsx is talking on this port"
        )
    if version != VERSION:
        raise ExchangeError(
            f"a message is of wire format {version}, this dsx speaks {VERSION}; run the same "
            "version of dsx on all clusters"
        )
    start = position + FIXED_BYTES
    body_start = start + codec_length + name_length + 8 * dimensions
    end = body_start + body_length
    if end > len(view):
        raise _truncated(position, end - position, left)
    (crc,) = _CRC.unpack(view[position + _HEAD.size : start])
    if zlib.crc32(view[start:end], zlib.crc32(head)) != crc:
        raise ExchangeError(
            f"the message at byte {position} of a bundle is damaged (its checksum does not match)"
        )
    codec = understand(bytes(view[start : start + codec_length]))
    label = bytes(view[start + codec_length : start + codec_length + name_length])
    shape = struct.unpack(f"<{dimensions}Q", view[body_start - 8 * dimensions : body_start])
    name = label.decode(errors="replace")
    if name not in expected or tuple(expected[name]) != shape:
        known = f"has shape {tuple(expected[name])}" if name in expected else "is not expected"
        raise ExchangeError(
            f"a message is about {name!r} of shape {shape}, which here {known}; the clusters "
            "train different models or split them differently"
        )
    body = torch.from_numpy(np.frombuffer(view, np.uint8, body_length, body_start))
    return Message(name, shape, round_, codec, body), end


def _truncated(position: int, wanted: int, left: int) -> ExchangeError:
    return ExchangeError(
        f"the message at byte {position} of a bundle is truncated: {wanted} bytes are due, "
        f"{left} are left"
    )
