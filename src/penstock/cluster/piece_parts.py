"""A staged piece as messages: its rows in parts, and a header that says that all of them are there.

Part 0 is the header, which is stored last. Rows are cut every `part_bytes`, whatever is in them.
Must not know how messages are stored. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from struct import Struct

import msgspec

from penstock.core.write_rules import StagedPiece
from penstock.storage.staging import PieceContent

HEADER_PART = 0
EPOCH_BITS = 32
"""The number of a piece is `epoch << EPOCH_BITS | n`, so that two owners never give the same."""

_MAGIC = b"PSP1"
_HEAD = Struct("<4sI")  # magic, CRC


class PartedPiece(msgspec.Struct, frozen=True):
    """Rows take `part_count` parts from number 1 on, all but the last of `part_bytes`."""

    piece: StagedPiece
    content: PieceContent
    part_bytes: int
    part_count: int


_decoder = msgspec.msgpack.Decoder(PartedPiece)


def encode_header(header: PartedPiece) -> bytes:
    data = msgspec.msgpack.encode(header)
    return _HEAD.pack(_MAGIC, zlib.crc32(data)) + data


def decode_header(data: bytes) -> PartedPiece | None:
    """Returns None for a message that is no header, or a damaged one."""
    if len(data) < _HEAD.size:
        return None
    magic, crc = _HEAD.unpack_from(data)
    if magic != _MAGIC or zlib.crc32(data[_HEAD.size :]) != crc:
        return None
    try:
        return _decoder.decode(data[_HEAD.size :])
    except msgspec.MsgspecError:
        return None


def cut(buffers: Sequence[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yields the parts of the rows, joined from the buffers as they are needed."""
    held: list[memoryview] = []
    room = part_bytes
    for buffer in buffers:
        while len(buffer) >= room:
            yield b"".join((*held, buffer[:room]))
            buffer = buffer[room:]
            held, room = [], part_bytes
        if len(buffer):
            held.append(buffer)
            room -= len(buffer)
    if held:
        yield b"".join(held)


def epoch_of(number: int) -> int:
    return number >> EPOCH_BITS
