"""A data directory as the storage of an engine: the Wal, what was sealed from it, staged pieces.

Invariant: one process at a time has the directory open; its lock is held from `open` until the log
is closed. Must not know what a record means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.api.durability import Capabilities
from penstock.model.limits import Limits
from penstock.storage.checkpoint import Checkpoint, load_checkpoint, remove_leftovers
from penstock.storage.history_reader import HistoryReader
from penstock.storage.journal_files import JournalReader
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import Post, Replay, WalOptions
from penstock.storage.staging import StagedPieceFiles
from penstock.storage.vfs import Vfs
from penstock.storage.wal import Wal

DURABILITY = {
    "commit": "every answer waits until its data is synced to disk",
    "interval": "an answer waits for the write, not for the sync: "
    "a power cut may lose the last moments, a crash of the broker loses nothing",
    "none": "the operating system decides when data reaches the disk: "
    "a power cut may lose recent answers, a crash of the broker loses nothing",
}


class SealedFiles:
    """History and journal in a directory, and their readers."""

    def __init__(self, vfs: Vfs, path: str) -> None:
        self.vfs = vfs
        self.path = path
        self.history = HistoryReader(vfs, path)
        self.journal = JournalReader(vfs, path)


class DataDirectory:
    """See `Storage` for the interface."""

    def __init__(self, vfs: Vfs, path: str, options: WalOptions) -> None:
        self.capabilities = Capabilities(True, options.fsync, DURABILITY[options.fsync])
        self.sealed = SealedFiles(vfs, path)
        self.staged = StagedPieceFiles(vfs, path, options.reserve_bytes)
        self._vfs = vfs
        self._path = path
        self._options = options

    def open(self, limits: Limits, post: Post, recover: Callable[[Checkpoint], Replay]) -> Wal:
        def open_log(lock: DirectoryLock, first_segment: int, replay: Replay) -> Wal:
            return Wal.open(
                self._vfs,
                self._path,
                self._options,
                replay=replay,
                post=post,
                first_segment=first_segment,
                lock=lock,
            )

        return open_directory(self._vfs, self._path, limits, self.staged.load, recover, open_log)


OpenedLog = TypeVar("OpenedLog")


def open_directory(
    vfs: Vfs,
    path: str,
    limits: Limits,
    load_staged: Callable[[], None],
    recover: Callable[[Checkpoint], Replay],
    open_log: Callable[[DirectoryLock, int, Replay], OpenedLog],
) -> OpenedLog:
    """Loads what is sealed, then opens the log behind it: `open_log` gets the directory's lock, the
    first segment that is not sealed, and the Replay of `recover`."""
    vfs.mkdir(path)
    lock = DirectoryLock.take(vfs, path)
    try:
        checkpoint = load_checkpoint(vfs, path, limits)
        replay = recover(checkpoint)
        load_staged()
        log = open_log(lock, checkpoint.first_segment, replay)
    except BaseException:
        lock.release()
        raise
    remove_leftovers(vfs, checkpoint)
    return log
