"""A read of a range that was fixed when it was opened: rows of a partition, or of the journal.

Invariant: each row of the range is given once and in order, whatever is sealed or rewritten
meanwhile, or the read fails. Pieces are read off the loop, one at a time, on threads that
consumers' pages do not need. Must not know where rows are kept: it is told how to read the next of
them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from penstock.engine.scheduler import Scheduler
from penstock.model.errors import Internal, InvalidArgument, NotYet, OutOfRange, PenstockError
from penstock.model.limits import MIB
from penstock.model.ranges import RowBytes
from penstock.storage.errors import NotYetInLog, SegmentGone, StorageError
from penstock.storage.history import HistoryGone
from penstock.storage.row_stream import EncodedRows, release_memory

_log = logging.getLogger("penstock.engine")

MOVED = (SegmentGone, HistoryGone, NotYetInLog)
"""Sealed or rewritten between the look-up and the read: look again."""
UNREADABLE = (OSError, ValueError, StorageError, msgspec.MsgspecError)

RELEASE_BYTES = 4 * MIB
"""A range that was larger gives memory back to the system when it ends, which takes about 0.3 ms.
"""

Piece = Callable[[], EncodedRows]
"""Reads rows; returns them and where the next ones begin. Blocks."""
NextPiece = Callable[[int, int], Piece]
"""Returns how to read the next piece of a range, from the first position to the second. Called on
the loop; a PenstockError ends the read."""
GotPiece = Callable[[RowBytes | PenstockError | None], None]
"""Takes the next bytes, None after the last, or why there are no more."""


class RangeRead:
    """`next` is asked for one piece at a time. `name` says in the log what is read."""

    def __init__(
        self,
        next_piece: NextPiece,
        scheduler: Scheduler,
        name: str,
        bounds: tuple[int, int],
        head: bytes,
        tail: bytes,
    ) -> None:
        self._next_piece = next_piece
        self._scheduler = scheduler
        self._name = name
        self.start, self.end = bounds
        self.at = self.start
        self.head = head
        self.tail = tail
        self._read_bytes = 0

    def is_over(self) -> bool:
        return self.at >= self.end

    def next(self, got: GotPiece) -> None:
        if self.is_over():
            got(None)
            return
        try:
            piece = self._next_piece(self.at, self.end)
        except PenstockError as error:
            got(error)
            return
        self._scheduler.in_background(partial(self._read, piece, got))

    def _read(self, piece: Piece, got: GotPiece) -> None:
        """Runs on a thread."""
        try:
            data, end = piece()
        except MOVED:
            self._scheduler.post(partial(self.next, got))
        except Exception as error:  # noqa: BLE001 - whatever it was, the reader waits
            self._scheduler.post(partial(got, log_unreadable(error, self._name)))
        else:
            self._scheduler.post(partial(self._got, data, end, got))
            self._read_bytes += len(data)
            if end >= self.end and self._read_bytes >= RELEASE_BYTES:
                release_memory()

    def _got(self, data: RowBytes, end: int, got: GotPiece) -> None:
        self.at = end
        if data:
            got(data)
        else:
            self.next(got)


def log_unreadable(error: Exception, what: str) -> Internal:
    """Logs why something cannot be read, and returns the error for whoever waits for it. What no
    damaged file explains is a defect, and its traceback is logged too."""
    is_defect = not isinstance(error, UNREADABLE)
    _log.error("cannot read %s: %s", what, str(error) or repr(error), exc_info=is_defect and error)
    return Internal(f"{what} cannot be read; the broker's log says more")


def bounds_within(
    oldest: int, newest: int, start: int | None, end: int | None, what: str
) -> tuple[int, int]:
    """Returns the bounds of the range asked for. None means as far as there is."""
    start = oldest if start is None else start
    end = newest if end is None else end
    if start < oldest:
        raise OutOfRange(f"{what}s below {oldest} are no longer kept; {start} was asked for")
    if max(start, end) > newest:
        raise NotYet(f"readable {what}s end at {newest}; {max(start, end)} was asked for")
    if start > end:
        raise InvalidArgument(f"start {start} is above end {end}")
    return start, end
