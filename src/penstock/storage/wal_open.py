"""Opens the log of a directory: locks it, recovers, cuts the torn tail, finds room.

Invariant: nothing on disk is changed before the whole log was read without CorruptLog and found to
reach to where an orderly stop left it. Nothing is returned before every recovered frame is on disk.
Must not know threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.storage.errors import CorruptLog
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import Replay, WalOptions
from penstock.storage.recovery import Recovered, cut_tail, settle_last, walk_log
from penstock.storage.segments import (
    MIN_SEGMENT_BYTES,
    Segment,
    TornTail,
    adopt_blank,
    encode_header,
    list_segments,
    prepare_segment,
)
from penstock.storage.stopped_file import check_log_reaches, load_stopped, remove_stopped
from penstock.storage.vfs import Vfs, remove_if_there

logger = logging.getLogger("penstock.storage")


class Opened(msgspec.Struct):
    """The last of `segments` is the active one; it and the spare have their files open."""

    lock: DirectoryLock
    segments: list[Segment]
    spare: Segment | None
    next_seq: int
    free_bytes: int
    tails: list[TornTail]
    has_closing_mark: bool
    """The log's last frame is the closing mark of an orderly stop."""


def open_log(
    vfs: Vfs,
    directory: str,
    options: WalOptions,
    first_segment: int,
    replay: Replay,
    lock: DirectoryLock | None,
) -> Opened:
    if options.segment_bytes < MIN_SEGMENT_BYTES:
        raise ValueError(f"segment_bytes must be at least {MIN_SEGMENT_BYTES}")
    if lock is None:
        lock = DirectoryLock.take(vfs, directory)
    files: list[Segment] = []
    try:
        stopped = load_stopped(vfs, directory)
        found = walk_log(vfs, directory, first_segment=first_segment, replay=replay)
        if stopped is not None:
            check_log_reaches(directory, stopped, found, first_segment)
        remove_stopped(vfs, directory)
        _clean_up(vfs, directory, first_segment, found)
        blank = _usable_blank(vfs, directory, found, options.segment_bytes, files.append)
        if found.segments:
            active = found.segments[-1]
            active.fd = vfs.open(active.path)
            files.append(active)
            settle_last(vfs, active, found.synced)
            spare = blank
        else:
            active = blank or _first_segment(vfs, directory, options.segment_bytes)
            files.append(active)
            active.first_seq = found.next_seq
            vfs.write_at_durable(active.fd, [encode_header(active.header())], 0)
            found.segments.append(active)
            spare = None
        for segment in found.segments[:-1]:
            segment.closed = True
        free_bytes = vfs.free_bytes(directory)
    except BaseException:
        for segment in files:
            vfs.close(segment.fd)
        lock.release()
        raise
    return Opened(
        lock,
        found.segments,
        spare,
        found.next_seq,
        free_bytes,
        found.tails,
        found.has_closing_mark,
    )


def _clean_up(vfs: Vfs, directory: str, first_segment: int, found: Recovered) -> None:
    """Removes leftovers and cuts the torn tail."""
    for number, path in list_segments(vfs, directory):
        if number < first_segment:
            remove_if_there(vfs, path)
    for tail in found.tails:
        logger.warning(
            "%s: cut the torn tail at byte %d: %d bytes, with %d whole frames that had not been "
            "synced. A crash during a write leaves this behind",
            tail.path,
            tail.position,
            tail.bytes,
            tail.frames,
        )
        cut_tail(vfs, tail)


def _usable_blank(
    vfs: Vfs,
    directory: str,
    found: Recovered,
    segment_bytes: int,
    opened: Callable[[Segment], None],
) -> Segment | None:
    """Returns the next segment, if an earlier run prepared it in full, and removes the other
    blanks. It goes from the last to the first: a missing number between two would look like
    damage to the next start."""
    usable: Segment | None = None
    for blank in reversed(found.blanks):
        if blank is found.blanks[0] and blank.capacity == segment_bytes:
            fd = vfs.open(blank.path)
            usable = adopt_blank(vfs, blank.number, blank.path, fd, segment_bytes)
            opened(usable)
            vfs.sync(fd)
        else:
            remove_if_there(vfs, blank.path)
        vfs.fsync_dir(directory)
    return usable


def _first_segment(vfs: Vfs, directory: str, segment_bytes: int) -> Segment:
    for segment in prepare_segment(vfs, directory, 1, segment_bytes):
        if segment is not None:
            return segment
    raise CorruptLog(directory, 0, "the first segment could not be made")
