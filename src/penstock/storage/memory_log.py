"""The log and the storage of a broker that keeps nothing: there is no disk behind them.

Invariant: what is committed becomes durable in a later turn of the loop, never within `commit`,
so that the engine meets the same order of events on both logs. Must not know the file system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.api.durability import Capabilities
from penstock.core.state import BrokerState
from penstock.model.errors import Unavailable
from penstock.model.limits import Limits
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.errors import SegmentGone
from penstock.storage.frames import MAX_FRAME_BYTES, POSITION_BITS
from penstock.storage.log import RECORD_OVERHEAD_BYTES, LogListener, NoListener, Post, Replay
from penstock.storage.staging import StagedInMemory

_FRAME_BYTES = 2 ** (POSITION_BITS - 1)

logger = logging.getLogger("penstock.storage")


class MemoryStorage:
    """See `Storage` for the interface."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            False, "none", "nothing is kept: all is lost when the broker stops"
        )
        self.staged = StagedInMemory()
        self.sealed = None

    def open(
        self, limits: Limits, post: Post, recover: Callable[[Checkpoint], Replay]
    ) -> MemoryLog:
        recover(Checkpoint(BrokerState(limits), [], [], 1))
        return MemoryLog(post)


class MemoryLog:
    """See `Log` for the interface and its contract."""

    is_shared = False

    def __init__(self, post: Post) -> None:
        self.seq = 1
        self.durable_seq = 0
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.failed: BaseException | None = None
        self.commits = 0
        self.commit_seconds = 0.0
        self.last_commit_seconds = 0.0
        self.last_commit_frames = 0
        self.last_commit_bytes = 0
        self._listener: LogListener = NoListener()
        self._post = post
        self._posted = False
        self._closed = False
        self._begin = self._end = self.seq << POSITION_BITS

    def start(self, listener: LogListener) -> None:
        self._listener = listener

    def append(self, records: Sequence[bytes]) -> int:
        nbytes = sum(map(len, records)) + len(records) * RECORD_OVERHEAD_BYTES
        return self._append(nbytes)

    def append_one(self, record: bytes) -> int:
        return self._append(len(record) + RECORD_OVERHEAD_BYTES)

    def commit(self) -> None:
        if self._end > self._begin and not self._posted:
            self._posted = True
            self._post(self._settle)

    def is_current(self) -> bool:
        return True

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        return not self._closed and self.failed is None

    @property
    def shortage(self) -> str:
        return "the broker is stopping"

    def check_space(self) -> None:
        pass

    def read(self, positions: Sequence[int]) -> list[bytes]:
        if positions:
            raise SegmentGone(positions[0])
        return []

    def roll(self) -> None:
        pass

    def closed_segments(self) -> list[tuple[int, str]]:
        return []

    def drop_segments(self, up_to_number: int) -> None:
        pass

    def stop_writing(self, error: BaseException) -> None:
        self.failed = error

    def close(self) -> None:
        if not self._closed:
            self._settle()
            self._closed = True

    @property
    def has_pending(self) -> bool:
        return self._end > self._begin or self.seq - 1 > self.durable_seq

    @property
    def first_position(self) -> int:
        return self._end

    @property
    def size_bytes(self) -> int:
        return 0

    def _append(self, nbytes: int) -> int:
        if self._closed or self.failed is not None:
            raise Unavailable("the broker is stopping")
        if self._end - self._begin > _FRAME_BYTES:
            self._next_frame()
        position = self._end
        self._end += nbytes
        return position

    def _next_frame(self) -> None:
        self.last_commit_bytes = self._end - self._begin
        self.seq += 1
        self._begin = self._end = self.seq << POSITION_BITS

    def _settle(self) -> None:
        self._posted = False
        if self.failed is not None:
            return
        if self._end > self._begin:
            self._next_frame()
        if self.seq - 1 == self.durable_seq or self._closed:
            return
        self.last_commit_frames = self.seq - 1 - self.durable_seq
        self.durable_seq = self.seq - 1
        self.commits += 1
        try:
            self._listener.durable(self.durable_seq)
        except Exception:
            logger.exception("a callback of the log failed; the log goes on")
