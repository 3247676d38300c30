"""Reads records by their positions, for readers that page through a backlog.

Invariant: returns exactly the bytes that were appended at each position, or raises. A frame is read
and checked whole before a record is taken from it, so that a byte that changed on disk is never
returned. Opens its own descriptors, so that a segment may be rolled or dropped while it is read.
Must not know who asks, nor hold any state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.storage.errors import CorruptLog, NotYetInLog, SegmentGone
from penstock.storage.frames import (
    LENGTH_BYTES,
    OFFSET_MASK,
    POSITION_BITS,
    frame_at,
    record_length,
)
from penstock.storage.segments import Segment
from penstock.storage.vfs import Vfs

_GAP_BYTES = 16 * 1024
"""Frames no further apart are read together: reading on is cheaper than another call."""
_RUN_BYTES = 1024 * 1024
"""The bytes that are read together, unless one frame alone is larger."""


class _Place(NamedTuple):
    """The place of frame `seq` in its segment."""

    seq: int
    start: int
    end: int


class _Payload(NamedTuple):
    """A frame's records: `data[start:end]`."""

    data: bytes
    start: int
    end: int


def read_records(
    vfs: Vfs, segments: Sequence[Segment], unwritten: Mapping[int, bytes], positions: Sequence[int]
) -> list[bytes]:
    """Returns the records in the order of `positions`. Each frame is read once, whatever that
    order is."""
    found = [b""] * len(positions)
    order = iter(sorted(range(len(positions)), key=positions.__getitem__))
    index = next(order, None)
    seqs = sorted({position >> POSITION_BITS for position in positions})
    for seq, payload in _payloads(vfs, segments, unwritten, seqs):
        while index is not None and positions[index] >> POSITION_BITS == seq:
            found[index] = _record_in(payload, positions[index])
            index = next(order, None)
    return found


def _record_in(payload: _Payload, position: int) -> bytes:
    data, start, end = payload
    begin = start + (position & OFFSET_MASK) + LENGTH_BYTES
    stop = begin + record_length(data, begin - LENGTH_BYTES) if begin <= end else begin
    if stop > end:
        raise ValueError(f"position {position} is not that of a record")
    return data[begin:stop]


def _payloads(
    vfs: Vfs, segments: Sequence[Segment], unwritten: Mapping[int, bytes], seqs: Sequence[int]
) -> Iterator[tuple[int, _Payload]]:
    """Yields the records of each frame; `seqs` rise. One run at a time is in memory."""
    fd = -1
    opened: Segment | None = None
    at = 0
    try:
        while at < len(seqs):
            # In this order: a frame gets its place after it is kept, and is kept until written.
            segment = _segment_of(segments, seqs[at])
            kept = unwritten.get(seqs[at])
            if kept is not None:
                yield seqs[at], _Payload(kept, 0, len(kept))
                at += 1
                continue
            if segment is not opened:
                if fd >= 0:
                    vfs.close(fd)
                    fd = -1
                fd = _open(vfs, segment, seqs[at])
                opened = segment
            run = _run(segment, unwritten, seqs, at)
            yield from _read_run(vfs, fd, segment, run)
            at += len(run)
    finally:
        if fd >= 0:
            vfs.close(fd)


def _segment_of(segments: Sequence[Segment], seq: int) -> Segment:
    index = bisect_right(segments, seq, key=lambda segment: segment.first_seq) - 1
    if index < 0:
        raise SegmentGone(seq << POSITION_BITS)
    if seq - segments[index].first_seq >= len(segments[index].offsets):
        raise NotYetInLog(seq)
    return segments[index]


def _open(vfs: Vfs, segment: Segment, seq: int) -> int:
    try:
        return vfs.open_read(segment.path)
    except FileNotFoundError:
        raise SegmentGone(seq << POSITION_BITS) from None


def _run(
    segment: Segment, unwritten: Mapping[int, bytes], seqs: Sequence[int], at: int
) -> list[_Place]:
    """Returns the frames from `at` on that are worth reading together."""
    offsets = segment.offsets
    places: list[_Place] = []
    for index in range(at, len(seqs)):
        seq = seqs[index]
        number = seq - segment.first_seq
        if number >= len(offsets) or seq in unwritten:
            break
        # In this order: the next frame is listed before it moves `used`.
        used = segment.used
        start = offsets[number]
        end = offsets[number + 1] if number + 1 < len(offsets) else used
        if places and (start > places[-1].end + _GAP_BYTES or end > places[0].start + _RUN_BYTES):
            break
        places.append(_Place(seq, start, end))
    return places


def _read_run(
    vfs: Vfs, fd: int, segment: Segment, run: list[_Place]
) -> Iterator[tuple[int, _Payload]]:
    base = run[0].start
    data = vfs.read_at(fd, run[-1].end - base, base)
    for seq, start, end in run:
        frame = frame_at(data, start - base, segment.salt)
        if frame is None or frame.seq != seq or frame.end != end - base:
            raise CorruptLog(segment.path, start, f"frame {seq}, which was sound, is invalid")
        yield seq, _Payload(data, frame.payload, frame.end)
