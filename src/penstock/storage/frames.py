"""The frame: the records of one commit, or of a part of a large one.

Invariant: a frame is on disk whole or it does not count. `frame_at` returns a frame only if its CRC
matches, so its content is what was encoded. Must not know files, segments or what a record means.
The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import NamedTuple

POSITION_BITS = 28
MAX_FRAME_BYTES = 2**POSITION_BITS
"""A payload is smaller than this, because a record's offset in it is the low part of its position.
The limit also keeps a damaged length from making a reader allocate more."""
OFFSET_MASK = MAX_FRAME_BYTES - 1

FRAME_MAGIC = b"\xfePF\xff"
"""The first bytes of a frame. They are not valid UTF-8, so keys and values cannot contain them."""

_FIXED = Struct("<4sI")  # magic, CRC
_COVERED = Struct("<QQII")  # sequence, synced, payload length, record count
_WHOLE = Struct("<4sIQQII")
FRAME_HEADER_BYTES = _WHOLE.size
LENGTH_BYTES = 4
_LENGTH = Struct("<I")
_pack_length = _LENGTH.pack


class Frame(NamedTuple):
    """A valid frame in a buffer. It begins at `offset`, and its payload is `[payload, end)`.
    Every frame up to sequence `synced` was on disk before this one was written: this distinguishes
    damage from a write that a crash interrupted."""

    offset: int
    seq: int
    synced: int
    payload: int
    end: int
    records: int


def encode_frame(seq: int, synced: int, salt: int, records: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Returns the header and the payload. The CRC starts with the segment's `salt`, so that bytes
    from elsewhere (an older file, a message that imitates a frame) are not taken for a frame."""
    payload = b"".join(
        chain.from_iterable(zip(map(_pack_length, map(len, records)), records, strict=True))
    )
    covered = _COVERED.pack(seq, synced, len(payload), len(records))
    crc = zlib.crc32(payload, zlib.crc32(covered, salt))
    return _FIXED.pack(FRAME_MAGIC, crc) + covered, payload


def frame_at(data: bytes | memoryview, offset: int, salt: int) -> Frame | None:
    """Returns the frame that begins at `offset`, or None if there is no valid one."""
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
    """Yields every valid frame that begins after `offset`, at any byte."""
    offset = data.find(FRAME_MAGIC, offset + 1)
    while offset >= 0:
        frame = frame_at(data, offset, salt)
        if frame is not None:
            yield frame
            offset = data.find(FRAME_MAGIC, frame.end)
        else:
            offset = data.find(FRAME_MAGIC, offset + 1)


def frame_records(data: bytes, frame: Frame) -> tuple[list[int], list[bytes]]:
    """Returns position and bytes of each record. Raises ValueError if the payload does not match
    the header; since the CRC is right, that is a bug in the writer."""
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
        raise ValueError(f"frame {seq} does not hold the {count} records that its header says")
    return positions, records


def record_length(data: bytes, at: int) -> int:
    """Returns the length prefix at this byte of a buffer."""
    length: int = _LENGTH.unpack_from(data, at)[0]
    return length
