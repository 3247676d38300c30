"""The end of a log that is in memory: the open frame, and how far it may grow.

Invariant: positions rise with each append; records that were appended together are in one frame;
`has_room` is a comparison, because it is asked before every record. A subclass closes frames, makes
them durable and sets the limits. Must not know files, nor who makes a frame durable.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from penstock.model.errors import TooLarge, Unavailable
from penstock.storage.frames import FRAME_HEADER_BYTES, MAX_FRAME_BYTES, POSITION_BITS
from penstock.storage.log import RECORD_OVERHEAD_BYTES, LogListener, NoListener

_SLACK_BYTES = 1024
"""Room for more frame headers, when what `has_room` was asked for is appended in parts."""
_NO_ROOM = -1

logger = logging.getLogger("penstock.storage")


class AppendingLog(ABC):
    """The part of `Log` that all logs share. `frame_bytes` is where an open frame is closed
    between two appends; no frame has `max_frame_bytes`."""

    def __init__(self, next_seq: int, frame_bytes: int, max_frame_bytes: int) -> None:
        self.seq = next_seq
        self.durable_seq = next_seq - 1
        self.failed: BaseException | None = None
        self.max_frame_bytes = min(max_frame_bytes, MAX_FRAME_BYTES)
        self.commits = 0
        self.commit_seconds = 0.0
        self.last_commit_seconds = 0.0
        self.last_commit_frames = 0
        self.last_commit_bytes = 0

        self._listener: LogListener = NoListener()
        self._frame_bytes = min(frame_bytes, self.max_frame_bytes)
        self._records: list[bytes] = []
        self._add = self._records.append
        self._extend = self._records.extend
        self._is_busy = False
        self._is_wanted = False
        self._is_closed = False
        self._end = self._soft_end = self._room_end = self._produce_end = 0  # as positions

    def start(self, listener: LogListener) -> None:
        self._listener = listener

    def append_one(self, record: bytes) -> int:
        position = self._end
        end = position + len(record) + RECORD_OVERHEAD_BYTES
        if end > self._soft_end:
            return self._append_to_new_frame([record])
        self._add(record)
        self._end = end
        return position

    def append(self, records: Sequence[bytes]) -> int:
        position = self._end
        end = position + sum(map(len, records)) + len(records) * RECORD_OVERHEAD_BYTES
        if end > self._soft_end:
            return self._append_to_new_frame(records)
        self._extend(records)
        self._end = end
        return position

    def has_room(self, nbytes: int, *, reserve: bool = False) -> bool:
        return self._end + nbytes <= (self._room_end if reserve else self._produce_end)

    @property
    def has_pending(self) -> bool:
        return bool(self._records) or self.seq - 1 > self.durable_seq

    def stop_writing(self, error: BaseException) -> None:
        self.failed = error
        self._is_busy = True  # for good: nothing more is handed over
        self._refuse_all()

    def _is_frame_full(self, nbytes: int) -> bool:
        """Says whether the open frame may not grow by so much, but a new one could have it."""
        most = self.max_frame_bytes - FRAME_HEADER_BYTES - _SLACK_BYTES
        return bool(self._records) and self._end + nbytes > (self.seq << POSITION_BITS) + most

    # -- for subclasses --------------------------------------------------------------------------

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def _close_frame(self) -> None:
        """Takes the records of the open frame away, and calls `_begin_frame`."""

    @abstractmethod
    def _set_limits(self) -> None:
        """Calls `_limit_frame`. Called when a frame begins, and when there is news of room."""

    def _append_to_new_frame(self, records: Sequence[bytes]) -> int:
        if self._soft_end == _NO_ROOM:
            if self.failed is not None:
                raise Unavailable(f"the log cannot be written: {self.failed}; restart the broker")
            raise Unavailable("the broker is stopping")
        nbytes = sum(map(len, records)) + len(records) * RECORD_OVERHEAD_BYTES
        if nbytes >= self.max_frame_bytes:
            raise TooLarge(f"{nbytes} bytes do not fit in one frame of the log")
        if self._records:
            self._close_frame()
        position = self._end
        self._extend(records)
        self._end = position + nbytes
        return position

    def _begin_frame(self) -> None:
        self._end = self.seq << POSITION_BITS
        self._soft_end = self._end + self._frame_bytes
        self._set_limits()

    @property
    def _open_bytes(self) -> int:
        """The bytes of the open frame in a segment, if it were closed now."""
        return self._end - (self.seq << POSITION_BITS) + FRAME_HEADER_BYTES

    def _limit_frame(self, room: int, produce_room: int, *, may_produce: bool) -> None:
        """Sets the two limits of the open frame: for produces, and for records that may use the
        reserve."""
        start = (self.seq << POSITION_BITS) - FRAME_HEADER_BYTES - _SLACK_BYTES
        self._room_end = start + min(room, self.max_frame_bytes)
        self._produce_end = start + min(produce_room, self.max_frame_bytes)
        if not may_produce:
            self._produce_end = _NO_ROOM

    def _refuse_all(self) -> None:
        self._soft_end = self._room_end = self._produce_end = _NO_ROOM

    def _count_commit(self, seconds: float, frames: int, nbytes: int) -> None:
        self.commits += 1
        self.commit_seconds += seconds
        self.last_commit_seconds = seconds
        self.last_commit_frames = frames
        self.last_commit_bytes = nbytes

    def _notify(self, callback: Callable[..., object], *args: object) -> None:
        try:
            callback(*args)
        except Exception:
            logger.exception("a callback of the log failed; the log goes on")
