"""Copies the sealed files of a shard from another broker, when the stream has left ours behind.

Invariant: nothing of a copy is opened before all of it is here and checked (copied_files.py). Files
never change, so a copy that breaks off goes on with those that it has; a file that the other broker
has removed meanwhile, because it sealed, means to begin again with its new manifest. Runs on a
thread. Must not know how the bytes travel, nor who owns the shard.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from penstock.model.errors import Unavailable
from penstock.model.limits import MIB
from penstock.storage.copied_files import CopiedFile, CopyDirectory, files_of, install
from penstock.storage.lock import DirectoryLock
from penstock.storage.manifest import MANIFEST_NAME, Manifest, decode_manifest
from penstock.storage.vfs import Vfs

CHUNK_BYTES = MIB
"""The bytes that are asked for in one request."""
MANIFESTS = 20
"""How often a copy begins again because the other broker has sealed."""
ATTEMPTS = 10
"""How often a request is sent that fails for the moment."""
PAUSE_S = 1.0
REPORT_S = 10.0

logger = logging.getLogger("penstock.cluster")


class FileGone(Exception):
    """The other broker no longer has this file."""


class PeerFailed(Exception):
    """The other broker did not answer, or refused. The text says why."""


class PeerFiles(Protocol):
    """The sealed files of another broker. Its methods block."""

    name: str

    def manifest(self) -> bytes:
        """Returns the content of its MANIFEST. Raises PeerFailed."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Reads a part of a file, shorter at its end. Raises FileGone, or PeerFailed."""
        ...


class CopyProgress(msgspec.Struct):
    """`next_seq` is the message that the copy will follow the stream from."""

    peer: str
    next_seq: int
    total_bytes: int
    done_bytes: int = 0


class Copier:
    """Makes a copy of the shard. `progress` is None while it does not."""

    def __init__(self, vfs: Vfs, directory: str, segment_bytes: int, reserve_bytes: int) -> None:
        self.progress: CopyProgress | None = None
        self._vfs = vfs
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._target = CopyDirectory(vfs, directory, segment_bytes)
        self._has_ended = threading.Event()
        self._reported_at = 0.0

    def end(self) -> None:
        """Breaks off what is under way."""
        self._has_ended.set()

    def run(self, peers: Sequence[PeerFiles], first_seq: int) -> None:
        """Copies from the first of the peers that can be copied from, and installs the copy. The
        stream begins with message `first_seq`. Raises Unavailable if none can."""
        lock = DirectoryLock.take(self._vfs, self._directory)
        try:
            reasons: list[str] = []
            for peer in peers:
                try:
                    self._copy_from(peer, first_seq)
                except PeerFailed as error:
                    reasons.append(f"{peer.name}: {error}")
                else:
                    install(self._vfs, self._directory)
                    return
            raise Unavailable(f"no copy could be made: {'; '.join(reasons) or 'no live broker'}")
        finally:
            self.progress = None
            lock.release()

    def _copy_from(self, peer: PeerFiles, first_seq: int) -> None:
        for _ in range(MANIFESTS):
            manifest = self._manifest_of(peer)
            if not manifest.snapshot or manifest.snapshot_mark is None:
                raise PeerFailed("it has sealed nothing")
            if manifest.next_seq < first_seq:
                raise PeerFailed(
                    f"its sealed files end before message {manifest.next_seq}, and the stream "
                    f"begins with {first_seq}"
                )
            try:
                self._copy_files(peer, manifest)
            except FileGone:
                logger.info(
                    "%s has sealed meanwhile: the copy goes on with its new files", peer.name
                )
                continue
            self._target.finish(manifest)
            logger.info("the copy of the shard from %s is whole", peer.name)
            return
        raise PeerFailed("it seals faster than its files can be copied")

    def _manifest_of(self, peer: PeerFiles) -> Manifest:
        data = self._patiently(peer.manifest)
        return decode_manifest(os.path.join(self._target.path, MANIFEST_NAME), data)

    def _copy_files(self, peer: PeerFiles, manifest: Manifest) -> None:
        files = files_of(manifest)
        total = sum(file.size for file in files)
        progress = self.progress = CopyProgress(peer.name, manifest.next_seq, total)
        self._target.begin(manifest)
        missing: list[CopiedFile] = []
        for file in files:
            if self._target.has(file, manifest):
                progress.done_bytes += file.size
            else:
                missing.append(file)
        wanted = total - progress.done_bytes
        if self._vfs.free_bytes(self._target.path) < wanted + self._reserve_bytes:
            raise Unavailable(
                f"a copy of the shard needs {wanted} bytes more than {self._reserve_bytes} on the "
                f"disk of {self._directory}: make room, or remove the old files there"
            )
        logger.info(
            "copying the shard from %s: %d files, %d of %d bytes are here already",
            peer.name, len(files), progress.done_bytes, total,
        )  # fmt: skip
        self._reported_at = time.monotonic()
        for file in missing:
            self._target.add(file, manifest, self._parts(peer, file, progress))

    def _parts(self, peer: PeerFiles, file: CopiedFile, progress: CopyProgress) -> Iterator[bytes]:
        at = 0
        while at < file.size:
            length = min(CHUNK_BYTES, file.size - at)
            data = self._patiently(lambda: peer.read(file.name, at, length))  # noqa: B023
            if not data or len(data) > length:
                raise PeerFailed(f"{file.name} is shorter there than its manifest says")
            at += len(data)
            progress.done_bytes += len(data)
            self._report(progress)
            yield data

    def _patiently(self, request: Callable[[], bytes]) -> bytes:
        """Repeats a request that fails for the moment: files never change."""
        for attempt in range(ATTEMPTS):
            if self._has_ended.is_set():
                raise Unavailable("the broker is stopping")
            try:
                return request()
            except PeerFailed:
                if attempt == ATTEMPTS - 1:
                    raise
                self._has_ended.wait(PAUSE_S)
        raise RuntimeError("unreachable")

    def _report(self, progress: CopyProgress) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_S:
            self._reported_at = now
            logger.info(
                "copying the shard from %s: %d of %d bytes",
                progress.peer, progress.done_bytes, progress.total_bytes,
            )  # fmt: skip
