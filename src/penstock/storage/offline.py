"""Inspects and verifies the data directory of a stopped broker.

Invariant: changes nothing, and holds the directory's lock meanwhile. `inspect` lists the content of
the segments; `verify` reports what a start would find (directory_check.py). Must not know the
command line: results are structs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.model.records import Record, decode_record
from penstock.storage.directory_check import Damage, SealedFile, check_directory, locked_directory
from penstock.storage.frames import frames_after
from penstock.storage.hidden_rows import HiddenRows
from penstock.storage.segments import (
    SEGMENT_HEADER_BYTES,
    TornTail,
    decode_header,
    first_not_zero,
    list_segments,
    records_of,
    walk_frames,
)
from penstock.storage.vfs import Vfs


class SegmentSummary(msgspec.Struct, frozen=True):
    """The state of one segment. `spare`: prepared, never written. `leftover`: sealed, a start
    removes it. `broken`: after the `used` readable bytes there is something other than zeros, with
    `frames_behind` whole frames in it."""

    number: int
    path: str
    bytes: int
    state: Literal["sound", "spare", "broken", "leftover"]
    used: int = 0
    first_seq: int = 0
    frames: int = 0
    records: int = 0
    frames_behind: int = 0


class RecordSeen(msgspec.Struct, frozen=True):
    """A record of the log. `record` is None if this version cannot decode it; `error` says why."""

    position: int
    bytes: int
    record: Record | None
    error: str = ""


class VerifyReport(msgspec.Struct, frozen=True):
    """The result of `verify`. The next start cuts `torn`, removes `leftovers`, and is refused with
    `damage`. Other damage in `files` makes groups wait for their messages. `hidden` are messages on
    disk that no reader finds; `index` lists the errors in the index of batches."""

    segments: list[SegmentSummary]
    torn: list[TornTail]
    damage: Damage | None
    files: list[SealedFile] = []
    leftovers: list[str] = []
    hidden: list[HiddenRows] = []
    index: list[str] = []

    @property
    def frames(self) -> int:
        return sum(segment.frames for segment in self.segments)

    @property
    def records(self) -> int:
        return sum(segment.records for segment in self.segments)


def inspect(
    vfs: Vfs, directory: str, *, records: bool = False
) -> Iterator[SegmentSummary | RecordSeen]:
    """Yields each segment's summary, followed by its readable records if `records`."""
    with locked_directory(vfs, directory, is_reading=True):
        for number, path in list_segments(vfs, directory):
            data = vfs.read_file(path)
            yield summary(number, path, data)
            if records:
                yield from _records(path, data)


def verify(vfs: Vfs, directory: str) -> VerifyReport:
    """Reads everything and reports what a start would find."""
    with locked_directory(vfs, directory, is_reading=True):
        found = check_directory(vfs, directory)
        segments = []
        for number, path in list_segments(vfs, directory):
            data = vfs.read_file(path)
            if number < found.first_segment:
                segments.append(SegmentSummary(number, path, len(data), "leftover"))
            else:
                segments.append(summary(number, path, data))
        return VerifyReport(
            segments,
            found.torn,
            found.damage,
            found.files,
            found.leftovers,
            found.hidden,
            [fault.detail for fault in found.faults],
        )


def summary(number: int, path: str, data: bytes) -> SegmentSummary:
    header = decode_header(data)
    if header is None:
        blank = first_not_zero(data, 0) is None
        return SegmentSummary(number, path, len(data), "spare" if blank else "broken")
    used = SEGMENT_HEADER_BYTES
    frames = records = 0
    for frame in walk_frames(data, header):
        used = frame.end
        frames += 1
        records += frame.records
    sound = first_not_zero(data, used) is None
    behind = 0 if sound else sum(1 for _ in frames_after(data, used, header.salt))
    return SegmentSummary(
        number=number,
        path=path,
        bytes=len(data),
        state="sound" if sound else "broken",
        used=used,
        first_seq=header.first_seq,
        frames=frames,
        records=records,
        frames_behind=behind,
    )


def _records(path: str, data: bytes) -> Iterator[RecordSeen]:
    header = decode_header(data)
    if header is None:
        return
    for frame in walk_frames(data, header):
        for position, record in records_of(path, data, frame):
            try:
                yield RecordSeen(position, len(record), decode_record(record))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield RecordSeen(position, len(record), None, str(error))
