"""The directory lock: at most one process writes in a data directory.

Invariant: the holder of a DirectoryLock is alone in the directory until `release` or the end of the
process. It is a kernel lock on the directory itself, which cannot be removed while it has files, so
it holds whatever happens to the LOCK file. A killed broker leaves no lock behind. The LOCK file is
locked as well: older releases check only that, and it names the process. Must not know what else is
in the directory.
"""

from __future__ import annotations

import errno
import logging
import os

from penstock.storage.errors import DirectoryInUse, DirectoryReplaced
from penstock.storage.vfs import Vfs

LOCK_NAME = "LOCK"

_CANNOT_LOCK = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems, such as NFS, that can lock files but not directories."""

logger = logging.getLogger("penstock.storage")


class DirectoryLock:
    """Held from `take` to `release`. The LOCK file names the process, for error messages only."""

    def __init__(self, vfs: Vfs, directory: str, fds: list[int]) -> None:
        self._vfs = vfs
        self._directory = directory
        self._fds = fds
        self._identity = vfs.identity(directory)

    @classmethod
    def take(cls, vfs: Vfs, directory: str, *, is_reading: bool = False) -> DirectoryLock:
        """Locks the directory. Creates it and its LOCK file, unless `is_reading`: then a missing or
        read-only file is left as it is."""
        if not is_reading:
            vfs.mkdir(directory)
        path = os.path.join(directory, LOCK_NAME)
        fds: list[int] = []
        try:
            _lock_directory(vfs, directory, fds)
            if not is_reading or vfs.exists(path):
                _lock_file(vfs, path, fds, is_reading=is_reading)
            return cls(vfs, directory, fds)
        except BlockingIOError:
            _close_all(vfs, fds)
            raise DirectoryInUse(directory, _holder(vfs, path)) from None
        except BaseException:
            _close_all(vfs, fds)
            raise

    def check(self) -> None:
        """Raises DirectoryReplaced unless the directory at the path is the one that was locked."""
        try:
            is_same = self._vfs.identity(self._directory) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        if not is_same:
            raise DirectoryReplaced(self._directory)

    def release(self) -> None:
        fds, self._fds = self._fds, []
        _close_all(self._vfs, fds)


def _lock_directory(vfs: Vfs, directory: str, fds: list[int]) -> None:
    try:
        fds.append(vfs.lock_directory(directory))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        logger.warning(
            "%s cannot be locked itself (%s): only its %s file keeps a second broker out",
            directory,
            error,
            LOCK_NAME,
        )


def _lock_file(vfs: Vfs, path: str, fds: list[int], *, is_reading: bool) -> None:
    try:
        fd = vfs.lock_file(path)
    except OSError as error:
        if is_reading and error.errno == errno.EROFS:
            return
        raise
    fds.append(fd)
    try:
        vfs.truncate(fd, 0)
        vfs.write_at(fd, [b"%d\n" % vfs.process_id()], 0)
    except OSError:
        pass  # a full disk must not keep a broker from starting and delivering its backlog


def _close_all(vfs: Vfs, fds: list[int]) -> None:
    for fd in fds:
        vfs.close(fd)


def _holder(vfs: Vfs, path: str) -> int | None:
    try:
        return int(vfs.read_file(path))
    except (OSError, ValueError):
        return None
