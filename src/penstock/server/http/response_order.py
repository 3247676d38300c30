"""The responses of one HTTP connection, and the requests that wait to be started.

Adds to `ResponseQueue` what only HTTP has. A request may start while others before it are under
way; a stream starts when it is first, and what was pipelined behind it waits. Nothing starts while
the connection accepts no more bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.model.errors import PenstockError
from penstock.server.http.answer_budget import Claim
from penstock.server.http.requests import Request
from penstock.server.http.responses import (
    CLOSE,
    JSON_TYPE,
    STATUS_LINES,
    TYPED_PATHS,
    encode_json,
    error_body,
    error_head,
    typed_error,
)
from penstock.server.identity.credentials import Credential
from penstock.server.response_queue import Response, ResponseQueue

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection


MAX_PIPELINED = 64
"""Requests of one connection under way; beyond it, reading stops until some are answered."""


class Reply(Response):
    """The response to one request. A handler sends it, now or later, with one of the methods."""

    __slots__ = (
        "_connection",
        "_when_first",
        "cors_head",
        "credential",
        "held_bytes",
        "is_head",
        "is_http_1_1",
        "keep_alive",
        "path",
        "request",
        "request_id",
    )

    def __init__(self, connection: HttpConnection, request_id: bytes, keep_alive: bool) -> None:
        # The fields of Response are set here: a call of its __init__ is 4 % of a small request.
        self._queue = connection.order
        self.data: bytes | None = None
        self._make: Callable[[], None] | None = None
        self._make_bytes = 0
        self._connection = connection
        self.request_id = request_id
        self.keep_alive = keep_alive
        self.is_head = False
        self.is_http_1_1 = True
        self.path = b""
        self.cors_head = b""
        self.credential: Credential | None = None
        # The body of a request that waits; counted towards what all connections may hold.
        self.held_bytes = 0
        self.request: Request | None = None
        self._when_first: Callable[[], None] | None = None

    def send(self, status: int, body: bytes, head: bytes = JSON_TYPE) -> None:
        connection = self._connection
        self.data = b"%b%b%b%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            STATUS_LINES[status],
            connection.dispatch.date_header,
            head,
            self.cors_head,
            self.request_id,
            b"" if self.keep_alive else CLOSE,
            len(body),
            b"" if self.is_head else body,
        )
        connection.order.answered(self)

    def send_nothing(self, status: int = 204, head: bytes = b"") -> None:
        """Sends a response without a body and without headers that describe one: 204 or 304."""
        connection = self._connection
        self.data = b"%b%b%b%bx-request-id: %b\r\n%b\r\n" % (
            STATUS_LINES[status],
            connection.dispatch.date_header,
            head,
            self.cors_head,
            self.request_id,
            b"" if self.keep_alive else CLOSE,
        )
        connection.order.answered(self)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, encode_json(body))

    def send_forwarded(self, head: bytes, body: bytes) -> None:
        """Sends the answer of another broker: `head` are its status line and headers."""
        close = b"" if self.keep_alive else CLOSE
        self.data = b"%b%b%b\r\n%b" % (head, self.cors_head, close, body)
        self._connection.order.answered(self)

    def open_forwarded(self, head: bytes, *, is_chunked: bool) -> HttpConnection:
        """Sends the head of another broker's answer, whose body follows piece by piece."""
        connection = self._connection
        # As for `open_stream`: HTTP/1.0 has no chunks.
        connection.is_chunked = is_chunked and self.is_http_1_1
        self.keep_alive = self.keep_alive and (connection.is_chunked or not is_chunked)
        chunked = b"transfer-encoding: chunked\r\n" if connection.is_chunked else b""
        close = b"" if self.keep_alive else CLOSE
        connection.transport.write(b"%b%b%b%b\r\n" % (head, self.cors_head, chunked, close))
        return connection

    def is_alone(self) -> bool:
        """Returns whether no other request of the connection is under way."""
        return len(self._queue) == 1

    def before(self) -> list[Reply]:
        """Returns the responses of the connection that leave before this one."""
        return self._connection.order.before(self)

    def send_error(self, error: PenstockError, request_id: str | int | None = None) -> None:
        """Sends an error. `request_id` is the one that the body of the request had, if any."""
        if self._connection.order.blocker is self:
            self._connection.order.blocker = None
        is_typed = self.path.startswith(TYPED_PATHS)
        body = typed_error(error, request_id=request_id) if is_typed else error_body(error)
        self.send(error.http_status, encode_json(body), JSON_TYPE + error_head(error))

    def send_last_error(self, error: PenstockError) -> None:
        """Sends an error, and closes the connection after it. Requests behind it are dropped."""
        self._connection.order.drop_waiting()
        self._connection.shutdown()
        self.send_error(error)

    def settle(self, outcome: PenstockError | None) -> None:
        """Sends the outcome of a command: 204 or the error."""
        if outcome is None:
            self.send_nothing()
        else:
            self.send_error(outcome)

    def when_room(self, nbytes: int, make: Callable[[], None]) -> None:
        super().when_room(nbytes, partial(self._run, make))

    def _run(self, step: Callable[[], None]) -> None:
        """Runs a step of a handler that waited for the responses before this one. Every outcome is
        an answer, as in `RequestDispatch.handle`; a failure in the middle of a stream ends the
        connection."""
        try:
            step()
        except PenstockError as error:
            self.send_error(error)
        except Exception as error:  # noqa: BLE001 - the last resort, logged
            internal = self._connection.dispatch.defect(error, self.path)
            if self._connection.order.is_first(self) and self._connection.stream is None:
                self.send_error(internal)
            else:
                self._connection.break_stream()

    def peer(self) -> str:
        """Returns the address of the client."""
        peer = self._connection.transport.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""

    def is_wanted(self) -> bool:
        """Returns False once the connection is gone."""
        return self in self._connection.order

    def when_first(self, then: Callable[[], None]) -> None:
        """Makes this response a stream: runs `then` when all responses before it have left. What
        is pipelined behind it waits."""
        self._when_first = then
        self._connection.order.blocker = self
        self._connection.order.start_stream()

    def start_stream(self) -> None:
        then, self._when_first = self._when_first, None
        if then is not None:
            self._run(then)

    def open_stream(self, head: bytes) -> HttpConnection:
        """Sends the head of a chunked response that goes on until one side ends it."""
        connection = self._connection
        # HTTP/1.0 has no chunks: there the end of the connection is the end of the response.
        connection.is_chunked = self.is_http_1_1
        self.keep_alive = self.keep_alive and connection.is_chunked
        connection.transport.write(
            b"HTTP/1.1 200 OK\r\n%b%b%bx-request-id: %b\r\n%b%b\r\n"
            % (
                connection.dispatch.date_header,
                head,
                self.cors_head,
                self.request_id,
                b"transfer-encoding: chunked\r\n" if connection.is_chunked else b"",
                b"" if self.keep_alive else CLOSE,
            )
        )
        return connection


class ResponseOrder(ResponseQueue[Reply]):
    """`_waiting` are the requests that have not started. `blocker` is the response that is a
    stream, begun or not: it holds up all that wait."""

    __slots__ = ("_connection", "_is_advancing", "_is_asked", "_waiting", "blocker")

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(
            Claim(connection.dispatch.answers, connection.transport, self._is_answering)
        )
        self._connection = connection
        self.blocker: Reply | None = None
        self._waiting: deque[Reply] = deque()
        self._is_advancing = False
        self._is_asked = False

    def add_started(self, reply: Reply) -> None:
        self._queue.append(reply)
        if len(self._queue) > MAX_PIPELINED:
            self._connection.flow.pause_reading()

    def add_waiting(self, reply: Reply) -> None:
        """Adds a request that has not started; `advance` starts it when it may."""
        self._queue.append(reply)
        self._waiting.append(reply)

    def may_start(self) -> bool:
        """Returns whether a request may start now. Most start as soon as they have come."""
        return not (self._waiting or self.blocker or self._connection.flow.write_paused)

    def clear(self) -> None:
        """Forgets all responses: nobody can get them any more."""
        connection, dropped = self._connection, list(self._queue)
        super().clear()
        self._waiting.clear()
        self.blocker = None
        forwarder = connection.dispatch.forwarder
        for reply in dropped:
            connection.bodies.release(reply)
            if forwarder is not None:
                forwarder.dropped(reply)

    def before(self, reply: Reply) -> list[Reply]:
        """Returns the responses that leave before this one."""
        found = list(self._queue)
        return found[: found.index(reply)]

    def refuse_unanswered(self, error: PenstockError) -> None:
        """Answers the requests that were handed to an engine that is gone."""
        forwarder = self._connection.dispatch.forwarder
        for reply in list(self._queue):
            is_forwarded = forwarder is not None and forwarder.has(reply)
            if is_forwarded or reply.data is not None or reply in self._waiting:
                continue
            if self._connection.stream is not None and self.is_first(reply):
                self._connection.break_stream()
                return
            reply.send_error(error)

    def drop_waiting(self) -> None:
        """Forgets the requests that have not started."""
        for reply in self._waiting:
            self._queue.remove(reply)
            self._connection.bodies.release(reply)
        self._waiting.clear()

    def end_after_last(self) -> None:
        """Closes the connection after the last response that is due."""
        self._queue[-1].keep_alive = False

    def answered(self, response: Reply) -> None:
        queue = self._queue
        if queue and queue[0] is response:
            queue.popleft()
            self.write(response)
            connection = self._connection
            has_next = queue and (self._waiting or self.blocker or queue[0].is_answered())
            if has_next or connection.flow.read_paused or connection.is_half_closed:
                self.advance()

    def write(self, response: Reply) -> None:
        self._connection.write_reply(response)
        if self.answers.held_bytes and not self._connection.flow.write_paused:
            self.answers.hold(0)

    def has_room(self) -> bool:
        return not self._connection.flow.write_paused

    def advance(self) -> None:
        """Writes the responses that are first and answered, then starts the requests that may
        start. Both can call this again: the loop that is running serves the call, so that a long
        pipeline does not nest."""
        self._is_asked = True
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._is_asked:
                self._is_asked = False
                if not self.write_answered():
                    return
                self.start_stream()
                while self._waiting and not (self.blocker or self._connection.flow.write_paused):
                    self._connection.start_waiting(self._waiting.popleft())
        finally:
            self._is_advancing = False
        self._connection.order_advanced()

    def start_stream(self) -> None:
        if self._queue:
            self._queue[0].start_stream()

    def stream_ended(self) -> None:
        """Goes on after the stream that was first. Its head told the client whether the connection
        closes: if it did not, the client may have sent its next request already."""
        reply = self._queue.popleft()
        self.blocker = None
        if reply.keep_alive:
            self.advance()
        else:
            self._connection.finish()

    # -- backpressure ----------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        """Returns whether the connection has bytes of an answer to accept, not only events."""
        stream = self._connection.stream
        return stream is None or stream.is_answer or self.answers.held_bytes > 0

    def writing_resumed(self) -> None:
        """Releases the memory of answers that were accepted. A stream that is an answer does that
        itself."""
        self.answers.drained()
        stream = self._connection.stream
        if stream is None or not stream.is_answer:
            self.answers.hold(0)
