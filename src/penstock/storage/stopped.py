"""The STOPPED file: says that the broker stopped in order, and where its log ended then.

Invariant: it is written last of all, when the log with its closing mark is on disk, and its
removal is on disk before a start changes anything in the log. So while it is there, the log reaches
at least to the closing mark that it names; a log that does not was damaged since. A crash during a
stop or a start leaves it, and it is true, or leaves none, and the log is judged as after a kill.
Must not know what a record means. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os
import zlib

import msgspec

from penstock.storage.errors import CorruptLog, CorruptStopped
from penstock.storage.recovery import Recovered
from penstock.storage.segments import SEGMENT_HEADER_BYTES, segment_name
from penstock.storage.vfs import Vfs, remove_if_there

STOPPED_NAME = "STOPPED"
FORMAT_VERSION = 1

_HEAD = b"PENSTOCK-STOPPED"
_MAX_BYTES = 4096


class Stopped(msgspec.Struct, frozen=True):
    """The closing mark is frame `seq`, at byte `position` of segment `segment`, whose salt is
    `salt`."""

    segment: int
    salt: int
    seq: int
    position: int


_decoder = msgspec.json.Decoder(Stopped)


def write_stopped(vfs: Vfs, directory: str, stopped: Stopped) -> None:
    """The log up to and with the closing mark must be on disk already."""
    body = msgspec.json.encode(stopped)
    head = b"%b %d %08x\n" % (_HEAD, FORMAT_VERSION, zlib.crc32(body))
    vfs.write_file_atomically(os.path.join(directory, STOPPED_NAME), head + body)


def load_stopped(vfs: Vfs, directory: str) -> Stopped | None:
    """None after a kill, and in directories that only older releases have used."""
    path = os.path.join(directory, STOPPED_NAME)
    try:
        fd = vfs.open_read(path)
    except FileNotFoundError:
        return None
    try:
        data = vfs.read_at(fd, _MAX_BYTES, 0)
    finally:
        vfs.close(fd)
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != _HEAD:
        raise CorruptStopped(path, 0, "the first line is not that of this file")
    if words[2] != b"%08x" % zlib.crc32(body):
        raise CorruptStopped(path, len(head) + 1, "the checksum does not hold")
    if words[1] != b"%d" % FORMAT_VERSION:
        version = words[1].decode(errors="replace")
        detail = f"format version {version}; this release reads {FORMAT_VERSION}"
        raise CorruptStopped(path, 0, detail)
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptStopped(path, len(head) + 1, str(error)) from None


def check_reached(directory: str, stopped: Stopped, found: Recovered, first_segment: int) -> None:
    """CorruptLog unless the log reaches to the closing mark.

    It may go on behind the mark: a release that does not know this file has used the directory
    since. Then, or if the mark's segment is sealed, nothing that was there at the stop is missing.
    """
    if stopped.segment < first_segment:
        return
    path = os.path.join(directory, segment_name(stopped.segment))
    ended = f"the broker stopped in order when the log ended with frame {stopped.seq}"
    by_number = {segment.number: segment for segment in found.segments}
    segment = by_number.get(stopped.segment)
    if segment is None:
        raise CorruptLog(path, 0, f"{ended} in this file, which is missing or has no header")
    if segment.salt != stopped.salt:
        raise CorruptLog(path, 0, f"{ended} in another file of this name")
    index = stopped.seq - segment.first_seq
    if index >= len(segment.offsets):
        detail = f"{ended} at byte {stopped.position}, and it ends here now"
        raise CorruptLog(path, segment.used, detail)
    if index < 0 or segment.offsets[index] != stopped.position:
        at = SEGMENT_HEADER_BYTES if index < 0 else segment.offsets[index]
        raise CorruptLog(path, at, f"{ended} at byte {stopped.position}, where it is not")


def withdraw(vfs: Vfs, directory: str) -> None:
    """The log is about to be written: from now on it may end anywhere behind the mark."""
    path = os.path.join(directory, STOPPED_NAME)
    remove_if_there(vfs, f"{path}.tmp")
    if vfs.exists(path):
        vfs.unlink(path)
        vfs.fsync_dir(directory)
