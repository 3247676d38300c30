"""The turns of a connection: each request's place in the order of answers.

A Reply is answered by the fast lane, an AppTurn by the ASGI app. Neither knows how bytes are
ordered or written: that is the lane's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.model.errors import PenstockError
from penstock.server.replies import (
    CLOSE,
    JSON_TYPE,
    STATUS_LINES,
    encode_json,
    error_body,
    error_head,
)
from penstock.server.requests import Request

if TYPE_CHECKING:
    from penstock.server.lane import Lane


class Reply:
    """The place of one answer in its connection's order."""

    __slots__ = (
        "_lane",
        "_request_id",
        "_when_first",
        "data",
        "is_head",
        "is_http_1_1",
        "is_stream",
        "keep_alive",
        "request",
    )

    def __init__(self, lane: Lane, request_id: bytes, keep_alive: bool) -> None:
        self._lane = lane
        self._request_id = request_id
        self.keep_alive = keep_alive
        self.is_head = False
        self.is_http_1_1 = True
        self.is_stream = False
        self.data: bytes | None = None
        self.request: Request | None = None
        self._when_first: Callable[[], None] | None = None

    def send(self, status: int, body: bytes, head: bytes = JSON_TYPE) -> None:
        lane = self._lane
        self.data = b"%b%b%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            STATUS_LINES[status],
            lane.hub.date_header,
            head,
            self._request_id,
            b"" if self.keep_alive else CLOSE,
            len(body),
            b"" if self.is_head else body,
        )
        lane.answered(self)

    def send_nothing(self) -> None:
        """204: no body, and no header that speaks of one."""
        lane = self._lane
        self.data = b"HTTP/1.1 204 No Content\r\n%bx-request-id: %b\r\n%b\r\n" % (
            lane.hub.date_header,
            self._request_id,
            b"" if self.keep_alive else CLOSE,
        )
        lane.answered(self)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, encode_json(body))

    def send_error(self, error: PenstockError) -> None:
        if self.is_stream:
            self.is_stream = False
            self._lane.block(-1)
        self.send(error.http_status, encode_json(error_body(error)), JSON_TYPE + error_head(error))

    def settle(self, outcome: PenstockError | None) -> None:
        """For commands that answer 204 or an error."""
        if outcome is None:
            self.send_nothing()
        else:
            self.send_error(outcome)

    def is_wanted(self) -> bool:
        """False once the connection is gone."""
        return self._lane.is_waiting_for(self)

    def when_first(self, then: Callable[[], None]) -> None:
        """Runs `then` when all replies before this one have left: a stream begins. Whatever is
        pipelined behind it waits."""
        self.is_stream = True
        self._when_first = then
        self._lane.block(1)
        self._lane.start_first()

    def start(self) -> None:
        then, self._when_first = self._when_first, None
        if then is not None:
            then()

    def open_stream(self, head: bytes) -> Lane:
        """Sends the head of a chunked answer that goes on until one side ends it."""
        lane = self._lane
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the answer.
        lane.is_chunked = self.is_http_1_1
        framing = b"transfer-encoding: chunked\r\n" if lane.is_chunked else CLOSE
        lane.transport.write(
            b"HTTP/1.1 200 OK\r\n%b%bx-request-id: %b\r\n%b\r\n"
            % (lane.hub.date_header, head, self._request_id, framing)
        )
        return lane


class AppTurn:
    """A request of the ASGI app in its connection's order."""

    __slots__ = ("app", "cycle", "is_started")

    def __init__(self, cycle: Any, app: Any) -> None:
        self.cycle = cycle
        self.app = app
        self.is_started = False
