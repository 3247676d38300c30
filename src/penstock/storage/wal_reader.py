"""Records by position, for whoever pages through a backlog.

Invariant: returns exactly the bytes that were appended at each position, or raises. Opens its
own descriptors, so that a segment may be rolled or dropped while it is read. Must not know who
asks, nor hold any state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from penstock.storage.errors import CorruptLog, SegmentGone
from penstock.storage.frames import (
    FRAME_HEADER_BYTES,
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    OFFSET_MASK,
    POSITION_BITS,
    record_length,
)
from penstock.storage.segments import Segment
from penstock.storage.vfs import Vfs

_GAP_BYTES = 16 * 1024
"""Neighbours no further apart are read together: reading on is cheaper than another call."""
_RUN_BYTES = 1024 * 1024
_GUESS_BYTES = 4 * 1024
"""How much is read of a run's last record before its length is known."""


def read_records(
    vfs: Vfs, segments: Sequence[Segment], unwritten: Mapping[int, bytes], positions: Sequence[int]
) -> list[bytes]:
    """The records, in the order of `positions`; quickest when those rise."""
    found: list[bytes] = []
    fd = -1
    opened: Segment | None = None
    at = 0
    try:
        while at < len(positions):
            # In this order: a frame gets its place after it is kept, and is kept until written.
            segment = _segment_of(segments, positions[at])
            payload = unwritten.get(positions[at] >> POSITION_BITS)
            if payload is not None:
                found.append(_record_in(payload, positions[at]))
                at += 1
                continue
            if segment is not opened:
                if fd >= 0:
                    vfs.close(fd)
                    fd = -1
                fd = _open(vfs, segment, positions[at])
                opened = segment
            places = _run(segment, unwritten, positions, at)
            found.extend(_read_run(vfs, fd, segment, places))
            at += len(places)
    finally:
        if fd >= 0:
            vfs.close(fd)
    return found


def _record_in(payload: bytes, position: int) -> bytes:
    start = (position & OFFSET_MASK) + LENGTH_BYTES
    return payload[start : start + record_length(payload, start - LENGTH_BYTES)]


def _segment_of(segments: Sequence[Segment], position: int) -> Segment:
    seq = position >> POSITION_BITS
    index = bisect_right(segments, seq, key=lambda segment: segment.first_seq) - 1
    if index < 0:
        raise SegmentGone(position)
    if seq - segments[index].first_seq >= len(segments[index].offsets):
        raise ValueError(f"position {position} is not in the log yet")
    return segments[index]


def _open(vfs: Vfs, segment: Segment, position: int) -> int:
    try:
        return vfs.open_read(segment.path)
    except FileNotFoundError:
        raise SegmentGone(position) from None


def _run(
    segment: Segment, unwritten: Mapping[int, bytes], positions: Sequence[int], at: int
) -> list[int]:
    """Places in the file of the positions from `at` on that are worth reading together."""
    offsets = segment.offsets
    first_seq = segment.first_seq
    last_seq = first_seq + len(offsets) - 1
    places: list[int] = []
    for index in range(at, len(positions)):
        position = positions[index]
        seq = position >> POSITION_BITS
        if not first_seq <= seq <= last_seq or seq in unwritten:
            break
        place = offsets[seq - first_seq] + FRAME_HEADER_BYTES + (position & OFFSET_MASK)
        if places and not (
            places[-1] < place <= places[-1] + _GAP_BYTES and place <= places[0] + _RUN_BYTES
        ):
            break
        places.append(place)
    return places


def _read_run(vfs: Vfs, fd: int, segment: Segment, places: list[int]) -> list[bytes]:
    start = places[0]
    data = vfs.read_at(fd, places[-1] + _GUESS_BYTES - start, start)
    found: list[bytes] = []
    for place in places:
        begin = place - start + LENGTH_BYTES
        if begin > len(data):
            raise CorruptLog(segment.path, place, "the file ends before this record")
        length = record_length(data, begin - LENGTH_BYTES)
        end = begin + length
        if end > len(data):
            # Only a run's last record can reach past what was read: records do not overlap.
            if place != places[-1] or length >= MAX_FRAME_BYTES:
                raise CorruptLog(segment.path, place, f"a record of {length} bytes cannot be here")
            data += vfs.read_at(fd, end - len(data), start + len(data))
            if end > len(data):
                raise CorruptLog(segment.path, place, "the file ends within this record")
        found.append(data[begin:end])
    return found
