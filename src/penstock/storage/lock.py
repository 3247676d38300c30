"""The directory lock: at most one process writes in a data directory.

Invariant: whoever holds a DirectoryLock is alone there until `release` or the end of the
process. The lock is the kernel's, not the file's existence, so a killed broker leaves none
behind. Must not know what else is in the directory.
"""

from __future__ import annotations

import os

from penstock.storage.errors import DirectoryInUse
from penstock.storage.vfs import Vfs

LOCK_NAME = "LOCK"


class DirectoryLock:
    """Held from `take` to `release`. The file says which process it was, for the error only."""

    def __init__(self, vfs: Vfs, fd: int) -> None:
        self._vfs = vfs
        self._fd: int | None = fd

    @classmethod
    def take(cls, vfs: Vfs, directory: str) -> DirectoryLock:
        vfs.mkdir(directory)
        path = os.path.join(directory, LOCK_NAME)
        try:
            fd = vfs.lock_file(path)
        except BlockingIOError:
            raise DirectoryInUse(directory, _holder(vfs, path)) from None
        try:
            vfs.truncate(fd, 0)
            vfs.write_at(fd, [b"%d\n" % vfs.process_id()], 0)
        except OSError:
            pass  # a full disk must not keep a broker from starting and draining
        return cls(vfs, fd)

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._vfs.close(fd)


def _holder(vfs: Vfs, path: str) -> int | None:
    try:
        return int(vfs.read_file(path))
    except (OSError, ValueError):
        return None
