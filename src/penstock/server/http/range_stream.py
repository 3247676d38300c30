"""The body of an answer that carries a range of rows to a connection, piece by piece.

Invariant: the next piece is read only when the connection has taken the one before, and only while
the reader may have it. Must not know where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.api.ranges import Range
from penstock.model.errors import PenstockError, PermissionDenied
from penstock.model.limits import KIB
from penstock.model.ranges import PIECE_BYTES, RowBytes
from penstock.server.http.streamed_response import Guard

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

WRITE_BYTES = 256 * KIB

_NOTHING = memoryview(b"")


class RangeStream:
    """Carries the pieces of a range to a connection."""

    is_answer = True

    def __init__(self, reply: Reply, guard: Guard, content_type: bytes) -> None:
        """`guard` is called before each piece."""
        self._reply = reply
        self._content_type = content_type
        self._connection: HttpConnection | None = None
        self._range: Range | None = None
        self._left = _NOTHING
        self._is_reading = False
        self._guard = guard

    def opened(self, outcome: Range | PenstockError) -> None:
        if isinstance(outcome, PenstockError):
            self._reply.send_error(outcome)
        elif self._reply.is_wanted():
            self._range = outcome
            self._connection = self._reply.open_stream(self._content_type)
            self._connection.stream = self
            self._left = memoryview(outcome.head)
            self.resume()

    # -- called by the connection --------------------------------------------------------------

    def pause(self) -> None:
        """Needs nothing: `resume` checks whether the connection is full."""

    def resume(self) -> None:
        connection, source = self._connection, self._range
        if connection is None or source is None:
            return
        while self._left and not connection.flow.write_paused:
            connection.write_chunk(self._left[:WRITE_BYTES])
            # An empty rest would keep the whole piece in memory.
            self._left = self._left[WRITE_BYTES:] or _NOTHING
        if self._left or self._is_reading or connection.flow.write_paused:
            return
        if self._guard is not None and not self._is_allowed(self._guard, connection):
            return
        self._is_reading = True
        if source.is_over():
            self._got(None)
        else:
            # Hold nothing first, so that readers who have waited come before this one's next piece.
            connection.order.answers.hold(0)
            connection.order.answers.ask(PIECE_BYTES + WRITE_BYTES, partial(source.next, self._got))

    def half_closed(self) -> bool:
        """Called when the client sends nothing more. Returns whether the connection stays open."""
        return False

    def disconnected(self) -> None:
        self._end()

    def _end(self) -> None:
        """Lets go of the range, which may hold much memory."""
        self._connection = self._range = None
        self._left = _NOTHING

    def _is_allowed(self, guard: Callable[[], None], connection: HttpConnection) -> bool:
        try:
            guard()
        except PermissionDenied:
            self._end()
            connection.break_stream()
            return False
        return True

    # -- called by the range -------------------------------------------------------------------

    def _got(self, piece: RowBytes | PenstockError | None) -> None:
        self._is_reading = False
        connection, source = self._connection, self._range
        if connection is None or source is None:
            return
        if piece is not None and not isinstance(piece, PenstockError):
            self._left = memoryview(piece)
            # The piece, and the part of it that the connection holds.
            connection.order.answers.hold(len(piece) + WRITE_BYTES)
            self.resume()
            return
        self._end()
        connection.order.answers.hold(0)
        if piece is None:
            if source.tail:
                connection.write_chunk(source.tail)
            connection.end_stream()
        else:
            connection.break_stream()
