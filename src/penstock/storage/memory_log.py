"""The log and the storage of a broker that keeps nothing: there is no disk behind them.

Invariant: what is committed becomes durable in a later turn of the loop, never within `commit`,
so that the engine meets the same order of events on both logs. Must not know the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.api.durability import Capabilities
from penstock.core.state import BrokerState
from penstock.model.limits import MIB, Limits
from penstock.storage.appending import AppendingLog
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.errors import SegmentGone
from penstock.storage.frames import MAX_FRAME_BYTES
from penstock.storage.log import Post, Replay
from penstock.storage.staging import StagedInMemory

_FRAME_BYTES = MIB
"""The records of an open frame are in memory, though nobody reads them."""


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


class MemoryLog(AppendingLog):
    """See `Log` for the interface and its contract. A frame only counts: it is dropped as soon as
    it is closed."""

    is_shared = False

    def __init__(self, post: Post) -> None:
        super().__init__(1, _FRAME_BYTES, MAX_FRAME_BYTES)
        self._post = post
        self._posted = False
        self._closed_bytes = 0
        self._begin_frame()

    def commit(self) -> None:
        if self._records and not self._posted:
            self._posted = True
            self._post(self._settle)

    def is_current(self) -> bool:
        return True

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        return not self._is_closed and self.failed is None

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

    def close(self) -> None:
        if not self._is_closed:
            self._settle()
            self._is_closed = True
            self._refuse_all()

    @property
    def first_position(self) -> int:
        return self._end

    @property
    def size_bytes(self) -> int:
        return 0

    def _close_frame(self) -> None:
        self._closed_bytes += self._open_bytes
        self._records.clear()
        self.seq += 1
        self._begin_frame()

    def _set_limits(self) -> None:
        """Does nothing: `has_room` needs no limits."""

    def _settle(self) -> None:
        self._posted = False
        if self.failed is not None:
            return
        if self._records:
            self._close_frame()
        if self.seq - 1 == self.durable_seq or self._is_closed:
            return
        frames, self.durable_seq = self.seq - 1 - self.durable_seq, self.seq - 1
        nbytes, self._closed_bytes = self._closed_bytes, 0
        self._count_commit(0.0, frames, nbytes)
        self._notify(self._listener.durable, self.durable_seq)
