"""A few numbers shared by the soak, its broker and the broker's sealing process.

One mapped file: the soak says which faults are in force and how far the clock is off; the
processes count what they do. It outlives a SIGKILL, and reading a number costs less than a system
call. Each number has one writer at a time, so no lock is needed.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

FAULTS = (
    "clock_shift_ms",
    "disk",  # one of the DISK_ values
    "broker_eio_in",  # the write so many writes from now fails with EIO; 0: none
    "child_eio_in",
)
COUNTS = (
    "seals",
    "seal failures",
    "files dropped",
    "files rewritten",
    "files joined",
    "journal files joined",
    "evictions",
    "pages read",
    "trims",
    "topics deleted",
    "writes without room",
    "failed writes",
)
DISK_HAS_ROOM, DISK_IS_SHORT, DISK_IS_FULL = range(3)

_NAMES = (*FAULTS, *COUNTS)
_NUMBER = struct.Struct("<q")


class Control:
    """`numbers[name]` reads, `numbers[name] = n` writes, for every process that has the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(_NUMBER.size * len(_NAMES)))
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def __getitem__(self, name: str) -> int:
        number: int = _NUMBER.unpack_from(self._map, _NAMES.index(name) * _NUMBER.size)[0]
        return number

    def __setitem__(self, name: str, number: int) -> None:
        _NUMBER.pack_into(self._map, _NAMES.index(name) * _NUMBER.size, number)

    def count(self, name: str, by: int = 1) -> None:
        self[name] += by

    def counts(self) -> dict[str, int]:
        return {name: self[name] for name in COUNTS}
