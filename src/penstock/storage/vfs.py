"""The only module of the storage that touches the operating system.

Invariant: a write either happened whole or raised; short writes are completed here. Nothing is
retried after an error. Must not know what the bytes mean. Tests replace this class by one that
fails, so every operation that the storage needs is a method here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Sequence

ZERO_STEP_BYTES = 1024 * 1024
"""Bytes that are zero-filled in one call: quick, and small enough to stop in between."""

_ZEROS = bytes(ZERO_STEP_BYTES)
_IOV_MAX = 1024
_DSYNC: int = getattr(os, "RWF_DSYNC", 0)
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_DSYNC = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Vfs:
    """Files as the storage sees them. Thread-safe, as the system calls are."""

    def __init__(self) -> None:
        self._dsync_flag = _DSYNC

    # Files

    def open(self, path: str, *, create: bool = False) -> int:
        """Opens a file for reading and writing. With `create`, the file must not exist yet."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return os.open(path, flags, 0o640)

    def open_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Puts the file's data, and the metadata needed to read it, on disk."""
        if sys.platform == "darwin":  # fsync there leaves the data in the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def write_at(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        self._write_all(fd, buffers, offset, 0)

    def write_at_durable(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        """Writes and syncs, with one system call where the platform has it."""
        if self._dsync_flag:
            try:
                self._write_all(fd, buffers, offset, self._dsync_flag)
                return
            except OSError as error:
                if error.errno not in _NO_DSYNC:
                    raise
                self._dsync_flag = 0
        self._write_all(fd, buffers, offset, 0)
        self.sync(fd)

    def zero_fill(self, fd: int, offset: int, length: int) -> None:
        """Writes zeros, at most ZERO_STEP_BYTES in a call. Real zeros, not only allocated blocks:
        the first write to an allocated block changes metadata too, which makes its sync slower."""
        self._write_all(fd, [memoryview(_ZEROS)[:length]], offset, 0)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Reads `length` bytes, or fewer at the end of the file."""
        data = self._pread(fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        have = len(data)
        while have < length and (data := self._pread(fd, length - have, offset + have)):
            parts.append(data)
            have += len(data)
        return b"".join(parts)

    def read_file(self, path: str) -> bytes:
        fd = self.open_read(path)
        try:
            return self.read_at(fd, self.size(fd), 0)
        finally:
            self.close(fd)

    # Names

    def mkdir(self, path: str) -> None:
        """Creates a directory and its parents, unless it exists."""
        os.makedirs(path, mode=0o750, exist_ok=True)
        self.fsync_dir(os.path.dirname(os.path.abspath(path)))

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        """Gives a file a second name, or a new one where a file can have one only. A name that is
        there stays."""
        try:
            os.link(old, new)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def fsync_dir(self, path: str) -> None:
        """Puts names that were created, renamed or removed in the directory on disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_file_atomically(self, path: str, *parts: bytes | memoryview) -> None:
        """Replaces the file. A reader finds the old content or the new one, also after a crash."""
        temporary = f"{path}.tmp"
        if self.exists(temporary):
            self.unlink(temporary)
        fd = self.open(temporary, create=True)
        try:
            self._write_all(fd, parts, 0, 0)
            self.sync(fd)
        finally:
            self.close(fd)
        self.rename(temporary, path)
        self.fsync_dir(os.path.dirname(path))

    # The machine

    def free_bytes(self, directory: str) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize

    def lock_file(self, path: str) -> int:
        """Locks a file, creating it if needed, and returns the descriptor that holds the lock until
        it is closed. Raises BlockingIOError if another process has the lock."""
        return _locked(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))

    def lock_directory(self, path: str) -> int:
        """Locks the directory itself, whatever happens to the files in it."""
        return _locked(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def identity(self, path: str) -> tuple[int, int]:
        """Identifies the file or directory that is at this path now."""
        status = os.stat(path)
        return status.st_dev, status.st_ino

    def process_id(self) -> int:
        return os.getpid()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    # The two calls that may read or write less than asked

    def _pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def _pwritev(
        self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
    ) -> int:
        return os.pwritev(fd, buffers, offset, flags)

    def _write_all(
        self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
    ) -> None:
        wanted = sum(map(len, buffers))
        written = self._pwritev(fd, buffers[:_IOV_MAX], offset, flags)
        if written == wanted:
            return
        rest = [memoryview(buffer) for buffer in buffers if buffer]
        while True:
            wanted -= written
            offset += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if not wanted:
                return
            rest[0] = rest[0][written:]
            written = self._pwritev(fd, rest[:_IOV_MAX], offset, flags)
            if written <= 0:
                raise OSError(errno.EIO, "the file took no more bytes")


def _locked(fd: int) -> int:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_if_there(vfs: Vfs, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        vfs.unlink(path)
