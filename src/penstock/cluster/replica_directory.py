"""A data directory as a broker's copy of a shared log: segments and sealed files. Staged pieces are
not in it, but with the services that all brokers share.

Invariant: one process at a time has the directory open. Its log is a beginning of the shared
stream. Must not know who owns the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from penstock.api.durability import Capabilities
from penstock.cluster.pieces import SharedPieceStore
from penstock.cluster.replicated_log import ReplicatedLog
from penstock.cluster.shared import SharedStream
from penstock.cluster.stream_identity import load_identity, write_identity
from penstock.cluster.stream_repair import LocalFrame
from penstock.engine.scheduler import Scheduler
from penstock.model.limits import Limits
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.copied_files import has_whole_copy, install
from penstock.storage.data_directory import SealedFiles, open_directory
from penstock.storage.frames import POSITION_BITS
from penstock.storage.kept_segments import kept_segments
from penstock.storage.lock import DirectoryLock
from penstock.storage.log import Post, Replay, WalOptions
from penstock.storage.segments import decode_header, list_segments, records_of, walk_frames
from penstock.storage.vfs import Vfs
from penstock.storage.wal_open import open_log


class LastFrame(msgspec.Struct):
    """The newest frame of the local files, to compare with the stream. `records` is empty if it is
    void, and if it is sealed. `seq` 0: there is none."""

    seq: int = 0
    records: list[bytes] = []
    is_void: bool = False


class ReplicaDirectory:
    """See `Storage` for the interface. It is used once: another life needs another one."""

    def __init__(
        self,
        vfs: Vfs,
        path: str,
        options: WalOptions,
        stream: SharedStream,
        staged: SharedPieceStore,
        scheduler: Scheduler,
        durability: str,
        *,
        is_current: Callable[[], bool],
        on_ended: Callable[[BaseException], None],
    ) -> None:
        """`durability` says in words what a success means."""
        self.capabilities = Capabilities(True, "commit", durability)
        self.sealed = SealedFiles(vfs, path)
        self.staged = staged
        self.last_frame = LastFrame()
        self._vfs = vfs
        self._path = path
        self._options = options
        self._stream = stream
        self._scheduler = scheduler
        self._is_current = is_current
        self._on_ended = on_ended
        self._ends_empty = False
        self._first_segment = 1
        self._identity: str | None = None
        self._sealed_epoch = 0
        """The epoch in force before the first frame of the segments."""

    @property
    def identity(self) -> str:
        """The stream that the files are a beginning of; empty if they never followed one."""
        if self._identity is None:
            self._identity = load_identity(self._vfs, self._path)
        return self._identity

    def remember_identity(self, identity: str) -> None:
        write_identity(self._vfs, self._path, identity)
        self._identity = identity

    def frames(self) -> Iterator[LocalFrame]:
        """Yields the frames that are here as they were, of sealed segments that are kept and of
        those that were recovered at the start. Blocks."""
        kept = kept_segments(self._vfs, self._path)
        yield from self._frames_of([path for number, path in kept if number < self._first_segment])
        own = list_segments(self._vfs, self._path)
        paths = [path for number, path in own if number >= self._first_segment]
        epoch = self._sealed_epoch
        for frame in self._frames_of(paths):
            yield frame._replace(epoch=epoch)
            epoch = frame.epoch_after(epoch)

    def _frames_of(self, paths: list[str]) -> Iterator[LocalFrame]:
        epoch = 0
        for path in paths:
            data = self._vfs.read_file(path)
            header = decode_header(data)
            if header is not None:
                for found in walk_frames(data, header):
                    records = [bytes(record) for _, record in records_of(path, data, found)]
                    frame = LocalFrame(found.seq, records, epoch)
                    yield frame
                    epoch = frame.epoch_after(epoch)

    def open(
        self, limits: Limits, post: Post, recover: Callable[[Checkpoint], Replay]
    ) -> ReplicatedLog:
        self._finish_copy()

        def begin(checkpoint: Checkpoint) -> Replay:
            self._ends_empty = checkpoint.ends_empty
            self._first_segment = checkpoint.first_segment
            self._sealed_epoch = checkpoint.state.epoch
            return recover(checkpoint)

        return open_directory(
            self._vfs, self._path, limits, self.staged.load, begin, self._open_log
        )

    def _finish_copy(self) -> None:
        """Goes on with a copy that was being installed when the broker ended."""
        if has_whole_copy(self._vfs, self._path):
            lock = DirectoryLock.take(self._vfs, self._path)
            try:
                install(self._vfs, self._path)
            finally:
                lock.release()

    def _open_log(self, lock: DirectoryLock, first_segment: int, replay: Replay) -> ReplicatedLog:
        last = self.last_frame

        def take(record: bytes, position: int) -> None:
            seq = position >> POSITION_BITS
            if seq != last.seq:
                last.seq, last.records = seq, []
            last.records.append(record)
            replay(record, position)

        opened = open_log(self._vfs, self._path, self._options, first_segment, take, lock)
        if opened.next_seq - 1 != last.seq:
            last.seq, last.records = opened.next_seq - 1, []
            is_sealed = not opened.segments[-1].offsets and len(opened.segments) == 1
            last.is_void = self._ends_empty if is_sealed else True
        return ReplicatedLog(
            self._vfs,
            self._path,
            self._options,
            opened,
            self._stream,
            self._scheduler,
            is_current=self._is_current,
            on_ended=self._on_ended,
        )
