"""The frame: the records of one commit (or a part of a large one), whole or not there at all.

Invariant: `frame_at` returns a frame only if its CRC holds; what it returns is what was encoded.
Must not know files, segments or what a record means. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import NamedTuple

POSITION_BITS = 28
MAX_FRAME_BYTES = 2**POSITION_BITS
"""A payload is smaller than this: a record's offset in it is the low part of its position, and a
damaged length cannot make a reader allocate more."""
OFFSET_MASK = MAX_FRAME_BYTES - 1

FRAME_MAGIC = b"\xfePF\xff"
"""Never part of UTF-8 text, so that keys and values cannot contain it."""

_FIXED = Struct("<4sI")  # magic, CRC
_COVERED = Struct("<QQII")  # sequence, synced, payload length, record count
_WHOLE = Struct("<4sIQQII")
FRAME_HEADER_BYTES = _WHOLE.size
LENGTH_BYTES = 4
_LENGTH = Struct("<I")
_pack_length = _LENGTH.pack


class Frame(NamedTuple):
    """A valid frame in a buffer: it begins at `offset`, its payload is `[payload, end)`.
    `synced`: every frame up to there was on disk before this one was written, which is what
    tells damage from a write that a crash interrupted."""

    offset: int
    seq: int
    synced: int
    payload: int
    end: int
    records: int


def encode_frame(seq: int, synced: int, salt: int, records: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The header and the payload. `salt` is the segment's: it starts the CRC, so that bytes from
    elsewhere (an older file, a message that imitates a frame) never pass for a frame here."""
    payload = b"".join(
        chain.from_iterable(zip(map(_pack_length, map(len, records)), records, strict=True))
    )
    covered = _COVERED.pack(seq, synced, len(payload), len(records))
    crc = zlib.crc32(payload, zlib.crc32(covered, salt))
    return _FIXED.pack(FRAME_MAGIC, crc) + covered, payload


def frame_at(data: bytes | memoryview, offset: int, salt: int) -> Frame | None:
    """The frame that begins at `offset`, or None if no valid one does."""
    payload = offset + FRAME_HEADER_BYTES
    if payload > len(data):
        return None
    magic, crc, seq, synced, length, records = _WHOLE.unpack_from(data, offset)
    end = payload + length
    if magic != FRAME_MAGIC or length >= MAX_FRAME_BYTES or end > len(data):
        return None
    if zlib.crc32(memoryview(data)[offset + _FIXED.size : end], salt) != crc:
        return None
    return Frame(offset, seq, synced, payload, end, records)


def frames_after(data: bytes, offset: int, salt: int) -> Iterator[Frame]:
    """Every valid frame that begins behind `offset`, at whatever byte."""
    offset = data.find(FRAME_MAGIC, offset + 1)
    while offset >= 0:
        frame = frame_at(data, offset, salt)
        if frame is not None:
            yield frame
            offset = data.find(FRAME_MAGIC, frame.end)
        else:
            offset = data.find(FRAME_MAGIC, offset + 1)


def frame_records(data: bytes, frame: Frame) -> tuple[list[int], list[bytes]]:
    """Position and bytes of each record. ValueError if the payload is not what the header says:
    with the CRC right, that is a defect of the writer."""
    positions: list[int] = []
    records: list[bytes] = []
    _, seq, _, at, end, count = frame
    base = (seq << POSITION_BITS) - at
    length_at = _LENGTH.unpack_from
    while at + LENGTH_BYTES <= end:
        positions.append(base + at)
        start = at + LENGTH_BYTES
        at = start + length_at(data, at)[0]
        records.append(data[start:at])
    if at != end or len(records) != count:
        raise ValueError(f"frame {seq} does not hold the {count} records it names")
    return positions, records


def record_length(data: bytes, at: int) -> int:
    """The length prefix at this place of a buffer."""
    length: int = _LENGTH.unpack_from(data, at)[0]
    return length
