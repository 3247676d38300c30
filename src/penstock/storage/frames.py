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
    """A valid frame in a buffer. `synced`: every frame up to there was on disk before this one
    was written, which is what tells damage from a write that a crash interrupted."""

    offset: int
    seq: int
    synced: int
    length: int
    records: int

    @property
    def payload(self) -> int:
        return self.offset + FRAME_HEADER_BYTES

    @property
    def end(self) -> int:
        return self.offset + FRAME_HEADER_BYTES + self.length


def encode_frame(seq: int, synced: int, salt: int, records: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The header and the payload. `salt` is the segment's: it starts the CRC, so that bytes from
    elsewhere (an older file, a message that imitates a frame) never pass for a frame here."""
    payload = b"".join(
        chain.from_iterable(zip(map(_pack_length, map(len, records)), records, strict=True))
    )
    covered = _COVERED.pack(seq, synced, len(payload), len(records))
    crc = zlib.crc32(payload, zlib.crc32(covered, salt))
    return _FIXED.pack(FRAME_MAGIC, crc) + covered, payload


def frame_at(data: bytes, offset: int, salt: int) -> Frame | None:
    """The frame that begins at `offset`, or None if no valid one does."""
    if offset + FRAME_HEADER_BYTES > len(data):
        return None
    magic, crc, seq, synced, length, count = _WHOLE.unpack_from(data, offset)
    payload = offset + FRAME_HEADER_BYTES
    if magic != FRAME_MAGIC or length >= MAX_FRAME_BYTES or payload + length > len(data):
        return None
    with memoryview(data) as view:
        if zlib.crc32(view[offset + _FIXED.size : payload + length], salt) != crc:
            return None
    return Frame(offset, seq, synced, length, count)


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


def frame_records(data: bytes, frame: Frame) -> list[tuple[int, bytes]]:
    """Position and bytes of each record. ValueError if the payload is not what the header says:
    with the CRC right, that is a defect of the writer."""
    found = []
    base = (frame.seq << POSITION_BITS) - frame.payload
    at = frame.payload
    end = frame.end
    length_at = _LENGTH.unpack_from
    while at + LENGTH_BYTES <= end:
        start = at + LENGTH_BYTES
        stop = start + length_at(data, at)[0]
        found.append((base + at, data[start:stop]))
        at = stop
    if at != end or len(found) != frame.records:
        raise ValueError(f"frame {frame.seq} does not hold the {frame.records} records it names")
    return found


def record_length(data: bytes, at: int) -> int:
    """The length prefix at this place of a buffer."""
    length: int = _LENGTH.unpack_from(data, at)[0]
    return length
