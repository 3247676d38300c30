"""Gives the sealed files of this broker to another one that copies them.

Invariant: only files that a manifest can name are read, in parts of at most CHUNK_BYTES, and all
requests together stay within a rate, so that serving does not suffer. Must not know HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from penstock.api.outcomes import Done
from penstock.cluster.copying import CHUNK_BYTES
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from penstock.model.limits import MIB
from penstock.storage.copied_files import is_copied_name
from penstock.storage.manifest import MANIFEST_NAME
from penstock.storage.vfs import Vfs

MAX_MANIFEST_BYTES = 256 * MIB
MAX_WAIT_MS = 5000
"""A request that would have to wait longer is refused: others copy as well."""


class SealedFileSource:
    """See `CopySource`."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        scheduler: Scheduler,
        monotonic_ms: Callable[[], int],
        bytes_per_second: int,
    ) -> None:
        self._vfs = vfs
        self._directory = directory
        self._scheduler = scheduler
        self._monotonic_ms = monotonic_ms
        self._bytes_per_ms = bytes_per_second / 1000
        self._free_at_ms = 0.0

    def manifest(self, done: Done[bytes]) -> None:
        path = os.path.join(self._directory, MANIFEST_NAME)
        self._later(CHUNK_BYTES, partial(self._read, path, 0, MAX_MANIFEST_BYTES), done)

    def read(self, name: str, offset: int, length: int, done: Done[bytes]) -> None:
        if not is_copied_name(name) or offset < 0 or not 0 < length <= CHUNK_BYTES:
            done(InvalidArgument(f"a sealed file, and at most {CHUNK_BYTES} bytes of it"))
            return
        path = os.path.join(self._directory, name)
        self._later(length, partial(self._read, path, offset, length), done)

    def _later(self, nbytes: int, work: Callable[[], bytes], done: Done[bytes]) -> None:
        now_ms = self._monotonic_ms()
        begin_ms = max(float(now_ms), self._free_at_ms)
        if begin_ms - now_ms > MAX_WAIT_MS:
            done(
                ResourceExhausted(
                    "other brokers copy as well, and the rate of copies is limited",
                    limit="cluster_copy_bytes",
                )
            )
            return
        self._free_at_ms = begin_ms + nbytes / self._bytes_per_ms

        def run() -> None:
            try:
                outcome: bytes | NotFound | Unavailable = work()
            except FileNotFoundError:
                outcome = NotFound("there is no such file any more")
            except OSError as error:
                outcome = Unavailable(f"the file cannot be read: {error.strerror}")
            self._scheduler.post(lambda: done(outcome))

        self._scheduler.later(int(begin_ms - now_ms), lambda: self._scheduler.in_thread(run))

    def _read(self, path: str, offset: int, length: int) -> bytes:
        fd = self._vfs.open_read(path)
        try:
            return self._vfs.read_at(fd, min(length, max(0, self._vfs.size(fd) - offset)), offset)
        finally:
            self._vfs.close(fd)
