"""The thread that writes and syncs frames.

Invariant: a batch is reported as written only after its frames are as durable as the mode asks, in
the order they were handed over. After one error this thread writes no more frames: it erases the
batch that failed and only then reports the error, so that a request which is refused for it never
takes effect at a later start. Must not know records, nor touch the state of the Wal: it gets
batches and posts what became of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter

from penstock.storage.errors import FailedWriteRemains
from penstock.storage.log import Post, WalOptions
from penstock.storage.segments import SEGMENT_HEADER_BYTES, Segment, encode_header
from penstock.storage.vfs import ZERO_STEP_BYTES, Vfs

logger = logging.getLogger("penstock.storage")


class Write:
    """Buffers that go to one place of one segment. A new segment is begun by its first write."""

    __slots__ = ("buffers", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, buffers: list[bytes]) -> None:
        self.segment = segment
        self.offset = offset
        self.buffers = buffers

    @property
    def end(self) -> int:
        return self.offset + sum(map(len, self.buffers))


class Batch:
    """The frames of one commit. The writer fills in `synced` and `seconds`."""

    __slots__ = ("frames", "nbytes", "rolled", "seconds", "seq", "synced", "writes")

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.seq = 0
        self.frames = 0
        self.nbytes = 0
        self.rolled = False
        self.synced = 0
        self.seconds = 0.0


class WalWriter:
    """`written` and `synced` are sequences; read them from elsewhere only after `stop`."""

    def __init__(
        self,
        vfs: Vfs,
        options: WalOptions,
        current: Segment,
        *,
        seq: int,
        post: Post,
        check_directory: Callable[[], object],
        on_written: Callable[[Batch], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.current = current
        self.written = seq
        self.synced = seq
        self.failure: BaseException | None = None
        self._vfs = vfs
        self._durable = options.fsync == "commit"
        self._put = vfs.write_at_durable if self._durable else vfs.write_at
        self._interval = options.fsync_interval_ms / 1000
        self._sync_due = 0.0
        self._post = post
        self._check_directory = check_directory
        self._on_written = on_written
        self._on_failed = on_failed
        self._batches: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self.hand_over: Callable[[Batch], None] = self._batches.put
        self.fail: Callable[[BaseException], None] = self._batches.put
        """Ends writing with this error, after the batches that were handed over before it."""
        self._next: Callable[[], Batch | BaseException | None] = self._batches.get
        if options.fsync == "interval":
            self._next = self._next_within_interval
        self._unfinished: Batch | None = None
        self._left: list[Segment] = []
        self._begun: list[Segment] = []
        """Segments that the current batch left, whose files are still open, and those it began."""
        self._thread = threading.Thread(target=self._run, name="penstock-wal-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when all that was handed over is written and synced, or the first error."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                if isinstance(batch, BaseException):
                    raise batch
                started = perf_counter()
                self._write(batch)
                batch.seconds = perf_counter() - started
                self._tell(partial(self._on_written, batch))
                self._close_left()
            self._sync()
        except BaseException as error:  # noqa: BLE001 - whatever ended it, the loop must know
            self.failure = self._erase_unfinished(error)
            self._tell(partial(self._on_failed, self.failure))

    def _write(self, batch: Batch) -> None:
        self._unfinished = batch
        for write in batch.writes:
            segment = write.segment
            if segment is not self.current:
                self._begin(segment)
            if write.buffers:
                self._put(segment.fd, write.buffers, write.offset)
        for segment in self._left:
            self._vfs.truncate(segment.fd, segment.used)
        self._unfinished = None
        self._begun.clear()
        if self._durable:
            self.synced = batch.seq
        elif self.written <= self.synced:
            self._sync_due = monotonic() + self._interval
        self.written = batch.seq
        batch.synced = self.synced

    def _begin(self, segment: Segment) -> None:
        """Begins a segment. In every mode the old one is synced before the header of the new one
        is written. Raises DirectoryReplaced if another directory is at this path by now."""
        self._check_directory()
        old = self.current
        self._vfs.sync(old.fd)
        self.synced = segment.first_seq - 1
        self._begun.append(segment)
        self._vfs.write_at_durable(segment.fd, [encode_header(segment.header())], 0)
        self.current = segment
        self._left.append(old)

    def _close_left(self) -> None:
        while self._left:
            segment = self._left.pop()
            fd, segment.fd = segment.fd, -1
            self._vfs.close(fd)

    def _erase_unfinished(self, error: BaseException) -> BaseException:
        """Erases what the failed batch may have left on disk. Returns the error to report.

        Goes from the last write to the first, and stops where it cannot go on: a start refuses a
        segment that has begun behind a torn one.
        """
        batch, self._unfinished = self._unfinished, None
        try:
            for write in reversed(batch.writes if batch is not None else []):
                _erase(self._vfs, write.segment.fd, write.offset, write.end)
                if write.segment in self._begun:
                    _erase(self._vfs, write.segment.fd, 0, SEGMENT_HEADER_BYTES)
        except OSError as second:
            remains = FailedWriteRemains(error, second)
            remains.__cause__ = error
            return remains
        return error

    def _next_within_interval(self) -> Batch | BaseException | None:
        while self.written > self.synced:
            wait = self._sync_due - monotonic()
            if wait > 0:
                try:
                    return self._batches.get(timeout=wait)
                except queue.Empty:
                    pass
            self._sync()
        return self._batches.get()

    def _sync(self) -> None:
        if self.written > self.synced:
            self._vfs.sync(self.current.fd)
            self.synced = self.written

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            self._post(callback)
        except RuntimeError:  # the loop is closed; `stop` tells its caller how far it came
            logger.warning("the event loop is closed: an outcome of the log was dropped")


def _erase(vfs: Vfs, fd: int, start: int, end: int) -> None:
    """Writes zeros, durably. Where that fails, the file is cut instead."""
    try:
        end = min(end, vfs.size(fd))  # what ran out of space is shorter, and has none for zeros
        for offset in range(start, end, ZERO_STEP_BYTES):
            vfs.zero_fill(fd, offset, min(ZERO_STEP_BYTES, end - offset))
        vfs.sync(fd)
    except OSError:
        vfs.truncate(fd, start)
        vfs.sync(fd)
