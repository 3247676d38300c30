"""Looking at, checking and repairing the log of a stopped broker.

Invariant: `inspect` and `verify` change nothing; `repair` changes nothing unless told to, cuts
only what a start would cut by itself, and sets damaged parts aside (renamed or copied) rather
than delete them. All take the directory's lock. Must not know the command line: what is found
comes back as structs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.model.records import Record, decode_record
from penstock.storage.errors import CorruptLog
from penstock.storage.frames import frames_after
from penstock.storage.lock import DirectoryLock
from penstock.storage.recovery import cut_tail, walk_log
from penstock.storage.segments import (
    SEGMENT_HEADER_BYTES,
    Tail,
    decode_header,
    first_not_zero,
    list_segments,
    records_of,
    walk_frames,
)
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs


class SegmentSummary(msgspec.Struct, frozen=True):
    """`spare`: prepared, never written. `broken`: something other than zeros follows `used`,
    the bytes that can be read; behind it, `frames_behind` frames are whole."""

    number: int
    path: str
    bytes: int
    state: Literal["sound", "spare", "broken"]
    used: int = 0
    first_seq: int = 0
    frames: int = 0
    records: int = 0
    frames_behind: int = 0


class RecordSeen(msgspec.Struct, frozen=True):
    """`record` is None where `error` says why the bytes are no record this version knows."""

    position: int
    bytes: int
    record: Record | None
    error: str = ""


class Damage(msgspec.Struct, frozen=True):
    """Why a start would be refused."""

    path: str
    position: int
    detail: str


class Report(msgspec.Struct, frozen=True):
    """`torn` would be cut at the next start; with `damage` there is no start."""

    segments: list[SegmentSummary]
    torn: list[Tail]
    damage: Damage | None

    @property
    def frames(self) -> int:
        return sum(segment.frames for segment in self.segments)

    @property
    def records(self) -> int:
        return sum(segment.records for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


class Repair(msgspec.Struct, frozen=True):
    """What was done, or would be. `set_aside` maps each file to the one that keeps its bytes."""

    done: bool
    cut: list[Tail]
    damage: Damage | None
    set_aside: dict[str, str]
    explanation: str


def inspect(
    vfs: Vfs, directory: str, *, records: bool = False
) -> Iterator[SegmentSummary | RecordSeen]:
    """Each segment's summary, followed by its readable records if asked for."""
    lock = _lock_existing(vfs, directory)
    try:
        for number, path in list_segments(vfs, directory):
            data = vfs.read_file(path)
            yield _summary(number, path, data)
            if records:
                yield from _records(path, data)
    finally:
        lock.release()


def verify(vfs: Vfs, directory: str) -> Report:
    """Reads everything and says what a start would say."""
    lock = _lock_existing(vfs, directory)
    try:
        torn, damage = _judge(vfs, directory)
        files = list_segments(vfs, directory)
        segments = [_summary(number, path, vfs.read_file(path)) for number, path in files]
        return Report(segments, torn, damage)
    finally:
        lock.release()


def repair(
    vfs: Vfs, directory: str, *, dry_run: bool = True, set_damage_aside: bool = False
) -> Repair:
    """Cuts a torn tail. Damage is only explained, unless `set_damage_aside` says to go on
    without what cannot be read: the log then ends before the damage."""
    lock = _lock_existing(vfs, directory)
    try:
        torn, damage = _judge(vfs, directory)
        if damage is None:
            for tail in [] if dry_run else torn:
                cut_tail(vfs, tail)
            return Repair(not dry_run, torn, None, {}, _explain_torn(torn))
        plan = _plan(vfs, directory, damage)
        done = set_damage_aside and not dry_run
        if done:
            _set_aside(vfs, directory, damage, plan)
        return Repair(done, torn, damage, plan, _explain_damage(damage, plan))
    finally:
        lock.release()


def _lock_existing(vfs: Vfs, directory: str) -> DirectoryLock:
    if not vfs.exists(directory):
        raise FileNotFoundError(f"there is no data directory {directory}")
    return DirectoryLock.take(vfs, directory)


def _judge(vfs: Vfs, directory: str) -> tuple[list[Tail], Damage | None]:
    """The log begins with the lowest segment there is: those before it were sealed."""
    files = list_segments(vfs, directory)
    first = files[0][0] if files else 1
    try:
        return walk_log(vfs, directory, first_segment=first).tails, None
    except CorruptLog as error:
        return [], Damage(error.path, error.position, error.detail)


def _summary(number: int, path: str, data: bytes) -> SegmentSummary:
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


def _plan(vfs: Vfs, directory: str, damage: Damage) -> dict[str, str]:
    """The damaged file and all after it: what follows a gap cannot be replayed."""
    paths = [path for _, path in list_segments(vfs, directory)]
    after = [path for path in paths if path >= damage.path]
    return {path: _free_name(vfs, path) for path in after}


def _free_name(vfs: Vfs, path: str) -> str:
    name = f"{path}.damaged"
    number = 1
    while vfs.exists(name):
        name = f"{path}.damaged.{number}"
        number += 1
    return name


def _set_aside(vfs: Vfs, directory: str, damage: Damage, plan: dict[str, str]) -> None:
    """From the end, so that an interruption leaves the same damage to be found again."""
    for path, aside in sorted(plan.items(), reverse=True):
        if path == damage.path and damage.position >= SEGMENT_HEADER_BYTES:
            vfs.write_file_atomically(aside, vfs.read_file(path))
            _zero_from(vfs, path, damage.position)
        else:
            vfs.rename(path, aside)
    vfs.fsync_dir(directory)


def _zero_from(vfs: Vfs, path: str, position: int) -> None:
    fd = vfs.open(path)
    try:
        size = vfs.size(fd)
        for offset in range(position, size, ZERO_STEP_BYTES):
            vfs.zero_fill(fd, offset, min(ZERO_STEP_BYTES, size - offset))
        vfs.sync(fd)
    finally:
        vfs.close(fd)


def _explain_torn(torn: list[Tail]) -> str:
    if not torn:
        return "The log is sound; there is nothing to repair."
    places = ", ".join(f"{tail.path} at byte {tail.position}" for tail in torn)
    return (
        f"A crash interrupted a write: {places}. With fsync mode commit, nothing acknowledged "
        "is in it; the next start cuts it off by itself."
    )


def _explain_damage(damage: Damage, plan: dict[str, str]) -> str:
    files = ", ".join(os.path.basename(path) for path in plan)
    return (
        f"{damage.path} is damaged at byte {damage.position}: {damage.detail}. This is no torn "
        "write: acknowledged messages and acks are in it. Restore the file from a copy if there "
        f"is one. Otherwise the log can be ended before the damage: all from there on ({files}) "
        "is then kept beside it under names that end in .damaged, and what it says is lost to "
        "the broker."
    )
