"""The STOPPED file: says that the broker stopped in order, and where its log ended.

Invariant: it is written last, when the log with its closing mark is on disk, and its removal is on
disk before a start changes the log. So while it exists, the log reaches at least to the closing
mark that it names; a shorter log was damaged since. A crash during a stop or a start leaves either
a true STOPPED file or none, and without one the log is judged as after a kill. Must not know what a
record means. The layout is in docs/storage-format.md.
"""

from __future__ import annotations

import os

import msgspec

from penstock.storage.errors import CorruptLog, CorruptStopped
from penstock.storage.headed_json import HeadedJson
from penstock.storage.recovery import Recovered
from penstock.storage.segments import SEGMENT_HEADER_BYTES, segment_name
from penstock.storage.vfs import Vfs, remove_if_there

STOPPED_NAME = "STOPPED"
FORMAT_VERSION = 1


class Stopped(msgspec.Struct, frozen=True):
    """The closing mark is frame `seq` at byte `position` of segment `segment`, which has `salt`."""

    segment: int
    salt: int
    seq: int
    position: int


_file = HeadedJson("PENSTOCK-STOPPED", FORMAT_VERSION, Stopped, CorruptStopped)


def write_stopped(vfs: Vfs, directory: str, stopped: Stopped) -> None:
    """Writes the file. The log, including the closing mark, must be on disk."""
    _file.write(vfs, os.path.join(directory, STOPPED_NAME), stopped)


def load_stopped(vfs: Vfs, directory: str) -> Stopped | None:
    """Returns None after a kill, and if only older releases have used the directory."""
    return _file.load(vfs, os.path.join(directory, STOPPED_NAME))


def check_log_reaches(
    directory: str, stopped: Stopped, found: Recovered, first_segment: int
) -> None:
    """Raises CorruptLog unless the log reaches the closing mark.

    The log may continue after the mark, if a release that does not know this file has used the
    directory since. Nothing is missing either if the mark's segment is sealed.
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


def remove_stopped(vfs: Vfs, directory: str) -> None:
    """Removes the file before the log is written, since the log may end anywhere from now on."""
    path = os.path.join(directory, STOPPED_NAME)
    remove_if_there(vfs, f"{path}.tmp")
    if vfs.exists(path):
        vfs.unlink(path)
        vfs.fsync_dir(directory)
