"""The segment file: a header, then frames in sequence, then zeros.

Invariant: a segment's header is on disk before its first frame is written, and a segment is synced
before the next one's header is written. So a crash never leaves a damaged header with frames behind
it, nor a damaged frame with a later segment behind it. Must not know the log as a whole
(recovery.py) nor who writes it (wal.py). The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator
from struct import Struct

import msgspec

from penstock.storage.errors import CorruptLog
from penstock.storage.frames import (
    FRAME_MAGIC,
    POSITION_BITS,
    Frame,
    frame_at,
    frame_records,
    frames_after,
)
from penstock.storage.numbered_files import NumberedFiles
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs

SEGMENT_MAGIC = b"PENSTOCK"
FORMAT_VERSION = 1
SEGMENT_HEADER_BYTES = 4096
"""A whole block, so that no later write touches the block of the header."""
MIN_SEGMENT_BYTES = 16 * 1024

_HEADER = Struct("<8sIIQQI")  # magic, version, salt, number, first sequence, CRC
_CRC = Struct("<I")
_files = NumberedFiles("wal-", ".seg")
segment_name = _files.name
_ZEROS = bytes(64 * 1024)


class SegmentHeader(msgspec.Struct, frozen=True):
    number: int
    first_seq: int
    salt: int


class Segment:
    """A segment of an open log. Frame `first_seq + i` begins at byte `offsets[i]`."""

    __slots__ = (
        "capacity",
        "closed",
        "fd",
        "first_seq",
        "number",
        "offsets",
        "path",
        "salt",
        "used",
    )

    def __init__(self, number: int, path: str, salt: int, *, fd: int = -1) -> None:
        self.number = number
        self.path = path
        self.salt = salt
        self.fd = fd
        self.first_seq = 0
        self.used = SEGMENT_HEADER_BYTES
        self.capacity = 0
        self.closed = False
        self.offsets = array("Q")

    @property
    def room(self) -> int:
        return self.capacity - self.used

    def header(self) -> SegmentHeader:
        return SegmentHeader(self.number, self.first_seq, self.salt)


class TornTail(msgspec.Struct, frozen=True):
    """Bytes behind the last valid frame that are not zero: a write that a crash interrupted.

    It may contain `frames` whole frames. They were never synced, and a frame before them is broken.
    """

    path: str
    position: int
    bytes: int
    frames: int = 0


def list_segments(vfs: Vfs, directory: str) -> list[tuple[int, str]]:
    """Returns number and path of every segment file, in order."""
    names = vfs.listdir(directory)
    return sorted(
        (number, os.path.join(directory, name))
        for name in names
        if (number := _files.number(name)) is not None
    )


def encode_header(header: SegmentHeader) -> bytes:
    fields = (SEGMENT_MAGIC, FORMAT_VERSION, header.salt, header.number, header.first_seq)
    crc = zlib.crc32(_HEADER.pack(*fields, 0)[: -_CRC.size])
    return _HEADER.pack(*fields, crc).ljust(SEGMENT_HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> SegmentHeader | None:
    """Returns None unless the header is whole, undamaged and of this version."""
    block = data[:SEGMENT_HEADER_BYTES]
    if len(block) < SEGMENT_HEADER_BYTES:
        return None
    _, _, salt, number, first_seq, _ = _HEADER.unpack_from(block)
    header = SegmentHeader(number, first_seq, salt)
    return header if encode_header(header) == block else None


def first_not_zero(data: bytes, start: int) -> int | None:
    """Returns the first byte from `start` on that is not zero, or None."""
    for at in range(start, len(data), len(_ZEROS)):
        block = data[at : at + len(_ZEROS)]
        if block != _ZEROS[: len(block)]:
            return at + len(block) - len(block.lstrip(b"\0"))
    return None


def last_not_zero(data: bytes, start: int) -> int:
    """Returns one past the last byte from `start` on that is not zero."""
    return start + len(data[start:].rstrip(b"\0"))


def walk_frames(data: bytes, header: SegmentHeader) -> Iterator[Frame]:
    """Yields the valid frames from the segment's beginning, up to the first gap."""
    view = memoryview(data)
    offset = SEGMENT_HEADER_BYTES
    seq = header.first_seq
    salt = header.salt
    while (frame := frame_at(view, offset, salt)) is not None and frame.seq == seq:
        yield frame
        offset = frame.end
        seq += 1


def judge_tail(
    path: str, data: bytes, header: SegmentHeader, end: int, seq: int
) -> TornTail | None:
    """Judges the bytes at `end`, behind the last valid frame, where frame `seq` should begin.

    Returns None if there is nothing, or the torn tail. Raises CorruptLog if a later frame shows
    that frame `seq` was on disk before.
    """
    if first_not_zero(data, end) is None:
        return None
    if frame_at(data, end, header.salt) is not None:
        raise CorruptLog(path, end, f"a frame out of sequence where frame {seq} should begin")
    whole = 0
    for later in frames_after(data, end, header.salt):
        if later.seq <= seq or later.synced >= seq:
            detail = f"frame {seq} is invalid and frame {later.seq} behind it is whole"
            raise CorruptLog(path, end, detail)
        whole += 1
    return TornTail(path, end, last_not_zero(data, end) - end, whole)


def judge_blank(path: str, data: bytes) -> TornTail | None:
    """Judges a file without a valid header: empty (None), an interrupted header, or CorruptLog."""
    if data.find(FRAME_MAGIC, SEGMENT_HEADER_BYTES) >= 0:
        raise CorruptLog(path, 0, "the segment's header is invalid and frames follow it")
    start = first_not_zero(data, 0)
    if start is None:
        return None
    return TornTail(path, start, last_not_zero(data, start) - start)


def records_of(path: str, data: bytes, frame: Frame) -> Iterator[tuple[int, bytes]]:
    """Returns position and bytes of each record of a valid frame."""
    try:
        positions, records = frame_records(data, frame)
    except ValueError as error:
        raise CorruptLog(path, frame.offset, str(error)) from None
    return zip(positions, records, strict=True)


class SegmentEnd(msgspec.Struct):
    """The end of a segment that was read: the next frame's number, and whether the last frame has
    no records."""

    next_seq: int = 0
    is_empty: bool = False


def read_segment(vfs: Vfs, path: str, end: SegmentEnd) -> Iterator[tuple[int, bytes]]:
    """Yields position and bytes of each record of a closed segment, then sets `end`. Any damage is
    CorruptLog."""
    data = vfs.read_file(path)
    header = decode_header(data)
    if header is None:
        raise CorruptLog(path, 0, "the segment's header is invalid")
    offset = SEGMENT_HEADER_BYTES
    seq = header.first_seq
    is_empty = False
    for frame in walk_frames(data, header):
        yield from records_of(path, data, frame)
        offset = frame.end
        seq += 1
        is_empty = not frame.records
    if first_not_zero(data, offset) is not None:
        raise CorruptLog(path, offset, f"frame {seq} is invalid")
    end.next_seq, end.is_empty = seq, is_empty


def first_position(vfs: Vfs, path: str) -> int:
    """Returns the position of a segment's first record, even if it has none yet."""
    fd = vfs.open_read(path)
    try:
        header = decode_header(vfs.read_at(fd, SEGMENT_HEADER_BYTES, 0))
    finally:
        vfs.close(fd)
    if header is None:
        raise CorruptLog(path, 0, "the segment's header is invalid")
    return header.first_seq << POSITION_BITS


def prepare_segment(vfs: Vfs, directory: str, number: int, size: int) -> Iterator[Segment | None]:
    """Creates a segment full of zeros and yields it last, once it is on disk.

    Yields None between steps, so that a log that is stopping need not wait for all of them.
    """
    path = os.path.join(directory, segment_name(number))
    fd = vfs.open(path, create=True)
    try:
        for offset in range(0, size, ZERO_STEP_BYTES):
            vfs.zero_fill(fd, offset, min(ZERO_STEP_BYTES, size - offset))
            yield None
        vfs.sync(fd)
        vfs.fsync_dir(directory)
    except BaseException:
        vfs.close(fd)
        raise
    yield adopt_blank(vfs, number, path, fd, size)


def adopt_blank(vfs: Vfs, number: int, path: str, fd: int, size: int) -> Segment:
    """Makes a zeroed file the segment that will be written next."""
    salt = int.from_bytes(vfs.random_bytes(4), "little")
    segment = Segment(number, path, salt, fd=fd)
    segment.capacity = size
    return segment
