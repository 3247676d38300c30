"""The thread that writes frames and syncs them.

Invariant: a batch is told as written only after its frames are as durable as the mode asks, in
the order they were handed over. After one error this thread never writes again. Must not know
records, nor touch the Wal's state: it gets batches and posts what became of them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter

from penstock.storage.log import Post, WalOptions
from penstock.storage.segments import Segment, encode_header
from penstock.storage.vfs import Vfs

logger = logging.getLogger("penstock.storage")


class Write:
    """Buffers that go to one place of one segment. A new segment is begun by its first write."""

    __slots__ = ("buffers", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, buffers: list[bytes]) -> None:
        self.segment = segment
        self.offset = offset
        self.buffers = buffers


class Batch:
    """What one commit writes. The writer fills in `synced` and `seconds`."""

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
        self._on_written = on_written
        self._on_failed = on_failed
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self.hand_over = self._batches.put
        self._next: Callable[[], Batch | None] = self._batches.get
        if options.fsync == "interval":
            self._next = self._next_within_interval
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
                started = perf_counter()
                self._write(batch)
                batch.seconds = perf_counter() - started
                self._tell(partial(self._on_written, batch))
            self._sync()
        except BaseException as error:  # noqa: BLE001 - whatever ended it, the loop must know
            self.failure = error
            self._tell(partial(self._on_failed, error))

    def _write(self, batch: Batch) -> None:
        for write in batch.writes:
            segment = write.segment
            if segment is not self.current:
                self._begin(segment)
            if write.buffers:
                self._put(segment.fd, write.buffers, write.offset)
        if self._durable:
            self.synced = batch.seq
        elif self.written <= self.synced:
            self._sync_due = monotonic() + self._interval
        self.written = batch.seq
        batch.synced = self.synced

    def _begin(self, segment: Segment) -> None:
        """In every mode the old segment is synced before the new one's header is there."""
        old = self.current
        self._vfs.sync(old.fd)
        self.synced = segment.first_seq - 1
        self._vfs.write_at_durable(segment.fd, [encode_header(segment.header())], 0)
        self.current = segment
        self._vfs.truncate(old.fd, old.used)
        fd, old.fd = old.fd, -1
        self._vfs.close(fd)

    def _next_within_interval(self) -> Batch | None:
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
            logger.warning("the log has news and the event loop is gone")
