"""Keeps room for the log: prepares the spare segment ahead and watches the free disk.

Invariant: a spare is offered only when it is full of zeros and on disk, with its name. A failure
here loses nothing and ends nothing; it is tried again when asked. Slow work runs on a thread of its
own, and its results are posted to the loop; everything else runs there. Must not know frames.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from penstock.storage.errors import DirectoryReplaced
from penstock.storage.log import Post, WalOptions
from penstock.storage.segments import MIN_SEGMENT_BYTES, Segment, prepare_segment, segment_name
from penstock.storage.vfs import Vfs, remove_if_there

SPARE_FACTOR = 4
"""The size of a spare, as a multiple of what the segment before it held. In a burst the third
one is full size."""
SMALLEST_SHARE = 16
"""The smallest spare, as a part of a full one."""

logger = logging.getLogger("penstock.storage")


class SegmentSupply:
    """`on_change` is called on the loop when there is news of the spare or the disk, `on_lost` when
    `check_directory` raises DirectoryReplaced."""

    def __init__(
        self,
        vfs: Vfs,
        directory: str,
        options: WalOptions,
        *,
        spare: Segment | None,
        free_bytes: int,
        post: Post,
        check_directory: Callable[[], object],
        on_change: Callable[[], object],
        on_lost: Callable[[BaseException], None],
    ) -> None:
        self.spare = spare
        self.free_bytes = free_bytes
        self.preparing = False
        self._check_directory = check_directory
        self._on_change = on_change
        self._on_lost = on_lost
        self._vfs = vfs
        self._directory = directory
        self._segment_bytes = options.segment_bytes
        self._spare_bytes = options.segment_bytes
        self._reserve_bytes = options.reserve_bytes
        self._post = post
        self._measuring = False
        self._offered: Segment | None = None
        self._stopping = threading.Event()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock-wal-supply", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Gives up a half-prepared spare rather than wait for it; closes what it holds."""
        self._stopping.set()
        self._tasks.put(None)
        self._thread.join()
        for segment in (self.spare, self._offered):
            if segment is not None and segment.fd >= 0:
                self._vfs.close(segment.fd)
                segment.fd = -1

    def may_produce(self) -> bool:
        """Says whether messages may be produced. When the disk is short, prepared room is kept
        for acks and the like."""
        in_sight = self.spare is not None or self.preparing
        return in_sight and self.free_bytes >= self._reserve_bytes

    @property
    def growth_bytes(self) -> int:
        """The bytes that the active segment may grow into free disk, when there is no spare or
        it is too small: half of what is left beside the reserve and a spare."""
        return (self.free_bytes - self._reserve_bytes - self._segment_bytes) // 2

    def take_spare(self) -> Segment | None:
        segment, self.spare = self.spare, None
        return segment

    def last_took(self, nbytes: int) -> None:
        """Sets the size of the next spare by what the last segment held. A segment that was
        rolled early needs no large one, and its zeros must be written too."""
        least = max(MIN_SEGMENT_BYTES, self._segment_bytes // SMALLEST_SHARE)
        self._spare_bytes = min(self._segment_bytes, max(least, SPARE_FACTOR * nbytes))

    def prepare(self, number: int) -> None:
        """Prepares segment `number` as the spare, unless there is one or it is under way."""
        if self.spare is None and not self.preparing:
            self.preparing = True
            self._tasks.put(partial(self._prepare, number, self._spare_bytes))

    def measure(self) -> None:
        if not self._measuring:
            self._measuring = True
            self._tasks.put(self._measure)

    def remove(self, paths: Sequence[str]) -> None:
        self._tasks.put(partial(self._remove, paths))

    def _prepared(self, segment: Segment | None, error: OSError | None) -> None:
        if self._stopping.is_set():
            return
        self.preparing = False
        self.spare, self._offered = segment, None
        if error is not None:
            logger.warning("no room for the log's next segment: %s", error)
        self._on_change()

    def _measured(self, free_bytes: int | None) -> None:
        self._measuring = False
        if free_bytes is not None:
            self.free_bytes = free_bytes
            self._on_change()

    # On the thread

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except OSError:
                logger.exception("the log's background work failed; it goes on")
            except RuntimeError:  # from posting: `stop` closes what nobody took
                logger.warning("the event loop is closed: an outcome of the log was dropped")

    def _prepare(self, number: int, size: int) -> None:
        path = os.path.join(self._directory, segment_name(number))
        segment: Segment | None = None
        failure: OSError | None = None
        try:
            self._check_directory()
            remove_if_there(self._vfs, path)
            for segment in prepare_segment(self._vfs, self._directory, number, size):
                if segment is None and self._stopping.is_set():
                    break
        except DirectoryReplaced as error:
            self._post(partial(self._on_lost, error))
            return
        except OSError as error:
            failure = error
        if segment is None:
            self._discard(path)
        self._offered = segment
        self._post(partial(self._prepared, segment, failure))

    def _discard(self, path: str) -> None:
        """Removes a half-prepared file, so that it does not take the little space that is left."""
        try:
            remove_if_there(self._vfs, path)
        except OSError as error:
            logger.warning("could not remove %s, which is half prepared: %s", path, error)

    def _measure(self) -> None:
        free_bytes: int | None = None
        try:
            free_bytes = self._vfs.free_bytes(self._directory)
        finally:
            self._post(partial(self._measured, free_bytes))

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            remove_if_there(self._vfs, path)
        self._vfs.fsync_dir(self._directory)
