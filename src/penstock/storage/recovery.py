"""Reads a whole log from its directory, and makes it fit to be appended to.

Invariant: the records replayed are a prefix of those ever written, in order. It holds all that were
reported durable, or CorruptLog is raised and nothing has been changed. Recovering twice changes
nothing the second time. Must not know what a record means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from penstock.storage.errors import CorruptLog, StorageError
from penstock.storage.frames import Frame
from penstock.storage.log import Replay
from penstock.storage.segments import (
    Segment,
    SegmentHeader,
    TornTail,
    decode_header,
    judge_blank,
    judge_tail,
    list_segments,
    records_of,
    segment_name,
    walk_frames,
)
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs


class Recovered(msgspec.Struct):
    """The result of `walk_log`. `blanks` are files without a header: prepared, never begun."""

    segments: list[Segment] = []
    blanks: list[Segment] = []
    tails: list[TornTail] = []
    next_seq: int = 1
    synced: int = 0
    """The last frame that is known to have been on disk before the log ended."""
    records: int = 0
    has_closing_mark: bool = False
    """True if the last frame has no records, as an orderly stop writes it."""


def walk_log(
    vfs: Vfs, directory: str, *, first_segment: int = 1, replay: Replay | None = None
) -> Recovered:
    """Reads every segment from `first_segment` on; changes nothing on disk."""
    found = Recovered()
    number_wanted = first_segment
    for number, path in list_segments(vfs, directory):
        if number < first_segment:
            continue
        if number != number_wanted:
            raise CorruptLog(path, 0, f"segment {number_wanted} before it is missing")
        number_wanted += 1
        data = vfs.read_file(path)
        header = decode_header(data)
        if header is None:
            blank_tail = judge_blank(path, data)
            if blank_tail is not None:
                found.tails.append(blank_tail)
            blank = Segment(number, path, 0)
            blank.capacity = len(data)
            found.blanks.append(blank)
        else:
            _check_begins(found, path, number, header)
            _walk_segment(found, path, data, header, replay)
    if first_segment > 1 and not found.segments:
        path = os.path.join(directory, segment_name(first_segment))
        raise CorruptLog(path, 0, f"segment {first_segment}, where the log begins, is missing")
    return found


def _check_begins(found: Recovered, path: str, number: int, header: SegmentHeader) -> None:
    """Raises CorruptLog if something before this segment is damaged or missing. All of it was on
    disk before the segment began."""
    if header.number != number:
        raise CorruptLog(path, 0, f"the header is that of segment {header.number}")
    blank = found.blanks[0] if found.blanks else None
    if found.tails and (blank is None or found.tails[0].path < blank.path):
        tail = found.tails[0]
        raise CorruptLog(tail.path, tail.position, f"invalid frame, but segment {number} has begun")
    if blank is not None:
        raise CorruptLog(blank.path, 0, f"no header, but segment {number} has begun")
    if (found.segments or number == 1) and header.first_seq != found.next_seq:
        detail = f"frame {found.next_seq} is missing: the file begins with {header.first_seq}"
        raise CorruptLog(path, 0, detail)
    found.next_seq = header.first_seq
    found.synced = max(found.synced, header.first_seq - 1)


def _walk_segment(
    found: Recovered, path: str, data: bytes, header: SegmentHeader, replay: Replay | None
) -> None:
    segment = Segment(header.number, path, header.salt)
    segment.first_seq = header.first_seq
    segment.capacity = len(data)
    frame: Frame | None = None
    for frame in walk_frames(data, header):
        segment.offsets.append(frame.offset)
        found.records += frame.records
        records = records_of(path, data, frame)
        if replay is not None:
            _replay_frame(path, frame, records, replay)
    if frame is not None:
        segment.used = frame.end
        found.next_seq = frame.seq + 1
        found.synced = max(found.synced, frame.synced)
    found.has_closing_mark = frame is not None and not frame.records
    tail = judge_tail(path, data, header, segment.used, found.next_seq)
    if tail is not None:
        found.tails.append(tail)
    found.segments.append(segment)


def _replay_frame(
    path: str, frame: Frame, records: Iterable[tuple[int, bytes]], replay: Replay
) -> None:
    """Replays the records of a frame. Raises CorruptLog if one does not fit what came before it:
    then the snapshot, or a segment, does not belong here."""
    try:
        for position, record in records:
            replay(record, position)
    except (OSError, MemoryError, StorageError):
        raise
    except Exception as error:
        detail = (
            f"a record of frame {frame.seq} cannot be applied to what the snapshot and the log "
            f"before it say ({type(error).__name__}: {error})"
        )
        raise CorruptLog(path, frame.offset, detail) from error


def cut_tail(vfs: Vfs, tail: TornTail) -> None:
    """Writes zeros over the torn tail, on disk before anything is appended there."""
    fd = vfs.open(tail.path)
    try:
        end = tail.position + tail.bytes
        for offset in range(tail.position, end, ZERO_STEP_BYTES):
            vfs.zero_fill(fd, offset, min(ZERO_STEP_BYTES, end - offset))
        vfs.sync(fd)
    finally:
        vfs.close(fd)


def settle_last(vfs: Vfs, segment: Segment, synced: int) -> None:
    """Puts every frame of the open segment on disk.

    A frame behind `synced` may have been read from memory only: its sync never ended, or failed,
    after which the kernel may call the page clean. Writing it again puts it on disk, or raises.
    """
    index = max(0, synced + 1 - segment.first_seq)
    if index < len(segment.offsets):
        for offset in range(segment.offsets[index], segment.used, ZERO_STEP_BYTES):
            length = min(ZERO_STEP_BYTES, segment.used - offset)
            vfs.write_at(segment.fd, [vfs.read_at(segment.fd, length, offset)], offset)
    vfs.sync(segment.fd)
