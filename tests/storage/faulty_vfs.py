"""A disk in memory that fails on request and forgets, in a crash, what was not synced.

It models what the storage relies on: a write sits in the page cache until a sync, or until a
durable write of the same bytes; a name is on disk after its directory was synced; a failed sync
drops the dirty pages, so that a second sync succeeds without writing them. Nothing less is
promised here, so that code which needs more is found out.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence

from penstock.storage.vfs import Vfs

SECTOR_BYTES = 512
DSYNC = 1
FLAVOURS = ("nothing", "everything", "sectors", "prefix")
"""What of the unsynced survives a crash: none, all, any sectors, or a first part."""


class _File:
    def __init__(self) -> None:
        self.cache = bytearray()
        self.disk = bytearray()
        self.dirty: list[tuple[int, int]] = []

    def put(self, data: bytes, offset: int) -> None:
        _put(self.cache, data, offset)
        self.dirty.append((offset, len(data)))

    def flush(self) -> None:
        for offset, length in self.dirty:
            _put(self.disk, bytes(self.cache[offset : offset + length]), offset)
        self.dirty.clear()
        del self.disk[len(self.cache) :]

    def after_crash(self, flavour: str, rng: random.Random) -> bytes:
        if flavour == "nothing":
            return bytes(self.disk)
        if flavour == "everything":
            return bytes(self.cache)
        image = bytearray(self.disk)
        if flavour == "prefix":
            left = rng.randint(0, sum(length for _, length in self.dirty))
            for offset, length in self.dirty:
                _put(image, bytes(self.cache[offset : offset + min(length, left)]), offset)
                left = max(0, left - length)
            return bytes(image)
        for sector in range(0, len(self.cache), SECTOR_BYTES):
            new = bytes(self.cache[sector : sector + SECTOR_BYTES])
            if rng.random() < 0.5 and new != self.disk[sector : sector + SECTOR_BYTES]:
                _put(image, new, sector)
        if len(self.cache) < len(self.disk) and rng.random() < 0.5:
            del image[len(self.cache) :]
        return bytes(image)


def _put(image: bytearray, data: bytes, offset: int) -> None:
    if data and len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


class FaultyVfs(Vfs):
    """`fail_call(n, code)` arms one fault; `capacity_bytes` is the size of the disk."""

    def __init__(self, *, capacity_bytes: int = 2**40) -> None:
        super().__init__()
        self._dsync_flag = DSYNC
        self.capacity_bytes = capacity_bytes
        self.calls: list[str] = []
        self.faults_hit = 0
        self._files: dict[str, _File] = {}
        self._files_on_disk: dict[str, _File] = {}
        self._open: dict[int, tuple[str, _File]] = {}
        self._locked: dict[int, str] = {}
        self.inodes: dict[str, int] = {}
        self._next_fd = 100
        self._mutex = threading.RLock()
        self._fault_at = 0
        self._fault_code = 0
        self._then_all_after: int | None = None
        self._fault_calls: frozenset[str] | None = None
        self._fault_path: str | None = None
        self._fault_thread: str | None = None
        self._held_path: str | None = None
        self._on_held: Callable[[], object] = bool
        self._released = threading.Event()
        self.is_held = False

    # Arranging

    def fail_call(
        self,
        number: int,
        code: int,
        *,
        only: Sequence[str] | None = None,
        path: str | None = None,
        thread: str | None = None,
        then_all_after: int | None = None,
    ) -> None:
        """The `number`th call from now (of those named in `only`, on the file `path`, by the
        thread of this name) fails with this errno; code 0 is a write that does only half of what
        it was asked. With `then_all_after`, so many calls after it succeed, and all that follow
        fail too."""
        with self._mutex:
            self._then_all_after = then_all_after
            self.faults_hit = 0
            self._fault_at = number
            self._fault_code = code
            self._fault_calls = frozenset(only) if only is not None else None
            self._fault_path = path
            self._fault_thread = thread

    def hold(self, path: str, on_held: Callable[[], object]) -> None:
        """The next sync or durable write of this file waits for `release`, and says it does."""
        self._released.clear()
        self.is_held = False
        self._on_held = on_held
        self._held_path = path

    def release(self) -> None:
        self._held_path = None
        self._released.set()

    def _wait_if_held(self, fd: int) -> None:
        if self._held_path is not None and self._open[fd][0] == self._held_path:
            self.is_held = True
            self._on_held()
            self._released.wait(20)

    def crash(self, flavour: str, seed: int = 0) -> FaultyVfs:
        """The disk as the next machine finds it. This one may go on, to be closed in peace."""
        rng = random.Random(seed)
        survivor = FaultyVfs(capacity_bytes=self.capacity_bytes)
        with self._mutex:
            for path in sorted({*self._files, *self._files_on_disk}):
                cached, stored = self._files.get(path), self._files_on_disk.get(path)
                file = stored if flavour == "nothing" else cached
                if flavour in ("sectors", "prefix") and cached is not stored:
                    file = rng.choice([cached, stored])
                if file is not None:
                    survivor.plant(path, file.after_crash(flavour, rng))
        return survivor

    def restarted(self) -> FaultyVfs:
        """The same machine after the process was killed: the page cache is still there."""
        survivor = FaultyVfs(capacity_bytes=self.capacity_bytes)
        with self._mutex:
            copies: dict[int, _File] = {}
            for file in (*self._files.values(), *self._files_on_disk.values()):
                copy = copies.setdefault(id(file), _File())
                copy.cache[:] = file.cache
                copy.disk[:] = file.disk
                copy.dirty[:] = file.dirty
            survivor._files = {path: copies[id(f)] for path, f in self._files.items()}
            disk = self._files_on_disk.items()
            survivor._files_on_disk = {path: copies[id(f)] for path, f in disk}
        return survivor

    def plant(self, path: str, data: bytes) -> None:
        """A file with this content, on disk."""
        file = _File()
        file.cache[:] = file.disk[:] = data
        self._files[path] = self._files_on_disk[path] = file

    def content(self, path: str) -> bytes:
        return bytes(self._files[path].cache)

    def paths(self) -> list[str]:
        return sorted(self._files)

    @property
    def open_files(self) -> int:
        return len(self._open) + len(self._locked)

    @property
    def used_bytes(self) -> int:
        return sum(len(file.cache) for file in self._files.values())

    def _called(self, name: str, path: str | None = None, *, writes: bool = False) -> bool:
        """Counts the call, and raises if it is the one to fail. True: a short write is due."""
        self.calls.append(name)
        if not self._fault_at or (self._fault_calls is not None and name not in self._fault_calls):
            return False
        if self._fault_path is not None and path != self._fault_path:
            return False
        if self._fault_thread not in (None, threading.current_thread().name):
            return False
        self._fault_at -= 1
        if self._fault_at:
            return False
        if self._fault_code:
            self.faults_hit += 1
            if self._then_all_after is not None:
                self._fault_at, self._then_all_after = self._then_all_after + 1, 0
            raise OSError(self._fault_code, os.strerror(self._fault_code), name)
        if writes:
            self.faults_hit += 1
            return True
        self._fault_at = 1  # a call that cannot be short: the next one, then
        return False

    # The calls

    def open(self, path: str, *, create: bool = False) -> int:
        with self._mutex:
            self._called("open")
            if create and path in self._files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if create:
                self._files[path] = _File()
            return self._opened(path)

    def open_read(self, path: str) -> int:
        with self._mutex:
            self._called("open_read")
            return self._opened(path)

    def _opened(self, path: str) -> int:
        if path not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._next_fd += 1
        self._open[self._next_fd] = (path, self._files[path])
        return self._next_fd

    def close(self, fd: int) -> None:
        with self._mutex:
            if self._open.pop(fd, None) is None and self._locked.pop(fd, None) is None:
                raise OSError(errno.EBADF, "closed twice")

    def size(self, fd: int) -> int:
        with self._mutex:
            self._called("size")
            return len(self._open[fd][1].cache)

    def truncate(self, fd: int, size: int) -> None:
        with self._mutex:
            self._called("truncate")
            if fd in self._open:
                cache = self._open[fd][1].cache
                del cache[size:]
                cache.extend(bytes(size - len(cache)))

    def sync(self, fd: int) -> None:
        self._wait_if_held(fd)
        with self._mutex:
            path, file = self._open[fd]
            try:
                self._called("sync", path)
            except OSError:
                file.dirty.clear()
                raise
            file.flush()

    def mkdir(self, path: str) -> None:
        with self._mutex:
            self._called("mkdir")

    def listdir(self, path: str) -> list[str]:
        with self._mutex:
            self._called("listdir")
            return [os.path.basename(p) for p in self._files if os.path.dirname(p) == path]

    def exists(self, path: str) -> bool:
        with self._mutex:
            is_file = path in self._files or path in self._locked.values()
            return is_file or any(os.path.dirname(p) == path for p in self._files)

    def rename(self, old: str, new: str) -> None:
        with self._mutex:
            self._called("rename")
            self._files[new] = self._files.pop(old)

    def link(self, old: str, new: str) -> None:
        with self._mutex:
            self._called("link")
            self._files.setdefault(new, self._files[old])

    def unlink(self, path: str) -> None:
        with self._mutex:
            self._called("unlink")
            if path not in self._files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            del self._files[path]

    def fsync_dir(self, path: str) -> None:
        with self._mutex:
            self._called("fsync_dir")
            inside = {p for p in (*self._files, *self._files_on_disk) if os.path.dirname(p) == path}
            for name in inside:
                if name in self._files:
                    self._files_on_disk[name] = self._files[name]
                else:
                    del self._files_on_disk[name]

    def free_bytes(self, directory: str) -> int:
        with self._mutex:
            self._called("free_bytes")
            return max(0, self.capacity_bytes - self.used_bytes)

    def lock_directory(self, path: str) -> int:
        with self._mutex:
            self._called("lock_directory")
            return self._lock(path)

    def identity(self, path: str) -> tuple[int, int]:
        with self._mutex:
            self._called("identity")
            return 1, self.inodes.get(path, 1)

    def lock_file(self, path: str) -> int:
        with self._mutex:
            self._called("lock_file")
            return self._lock(path)

    def _lock(self, path: str) -> int:
        with self._mutex:
            if path in self._locked.values():
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
            self._next_fd += 1
            self._locked[self._next_fd] = path
            return self._next_fd

    def _pread(self, fd: int, length: int, offset: int) -> bytes:
        with self._mutex:
            self._called("read")
            return bytes(self._open[fd][1].cache[offset : offset + length])

    def _pwritev(
        self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, flags: int
    ) -> int:
        data = b"".join(buffers)
        if flags == DSYNC:
            self._wait_if_held(fd)
        with self._mutex:
            if fd in self._locked:
                self._called("write")
                return len(data)
            path, file = self._open[fd]
            half = data[: len(data) // 2]
            try:
                if self._called("write", path, writes=True):
                    data = half
            except OSError:
                file.put(half, offset)
                raise
            grows = max(0, offset + len(data) - len(file.cache))
            if grows and self.used_bytes + grows > self.capacity_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            file.put(data, offset)
            if flags == DSYNC:
                file.dirty.pop()
                _put(file.disk, data, offset)
            return len(data)
