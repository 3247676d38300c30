"""The turns of a connection: each request's place in the order of answers.

Invariant: answers leave in the order of their requests, whoever gives them. A Reply is given by
the dispatch and may start while others before it are under way; an AppTurn, given by the ASGI
app, and a stream start when they are first, and hold up those behind them. Nothing starts while
the connection takes no more bytes, and no large answer is made then, nor before the budget for
answers has room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
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
    header_pairs,
    typed_error,
)

if TYPE_CHECKING:
    from penstock.server.http.connection import HttpConnection


MAX_PIPELINED = 64
"""Requests of one connection under way; beyond it, reading stops until some are answered."""


class Reply:
    """The place of one answer in its connection's order."""

    __slots__ = (
        "_connection",
        "_request_id",
        "_room_bytes",
        "_when_first",
        "_when_room",
        "cors_head",
        "data",
        "held_bytes",
        "is_head",
        "is_http_1_1",
        "is_stream",
        "keep_alive",
        "on_start",
        "path",
        "request",
    )

    def __init__(self, connection: HttpConnection, request_id: bytes, keep_alive: bool) -> None:
        self._connection = connection
        self._request_id = request_id
        self.keep_alive = keep_alive
        self.is_head = False
        self.is_http_1_1 = True
        self.path = b""
        self.cors_head = b""
        # Of a body that waits for its turn; counted towards what all connections may hold.
        self.held_bytes = 0
        self.is_stream = False
        self.data: bytes | None = None
        self.request: Request | None = None
        self.on_start: Callable[[], None] | None = None
        self._when_first: Callable[[], None] | None = None
        self._when_room: Callable[[], None] | None = None
        self._room_bytes = 0

    def send(self, status: int, body: bytes, head: bytes = JSON_TYPE) -> None:
        connection = self._connection
        self.data = b"%b%b%b%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
            STATUS_LINES[status],
            connection.dispatch.date_header,
            head,
            self.cors_head,
            self._request_id,
            b"" if self.keep_alive else CLOSE,
            len(body),
            b"" if self.is_head else body,
        )
        connection.order.answered(self)

    def send_nothing(self, status: int = 204, head: bytes = b"") -> None:
        """204 or 304: no body, and no header that speaks of one."""
        connection = self._connection
        self.data = b"%b%b%b%bx-request-id: %b\r\n%b\r\n" % (
            STATUS_LINES[status],
            connection.dispatch.date_header,
            head,
            self.cors_head,
            self._request_id,
            b"" if self.keep_alive else CLOSE,
        )
        connection.order.answered(self)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, encode_json(body))

    def send_error(self, error: PenstockError, request_id: str | int | None = None) -> None:
        """`request_id` is that of the body, if it had one."""
        if self.is_stream:
            self.is_stream = False
            self._connection.order.block(-1)
        is_typed = self.path.startswith(TYPED_PATHS)
        body = typed_error(error, request_id=request_id) if is_typed else error_body(error)
        self.send(error.http_status, encode_json(body), JSON_TYPE + error_head(error))

    def settle(self, outcome: PenstockError | None) -> None:
        """For commands that answer 204 or an error."""
        if outcome is None:
            self.send_nothing()
        else:
            self.send_error(outcome)

    def when_room(self, nbytes: int, send: Callable[[], None]) -> None:
        """Runs `send` when all replies before this one have left, the connection takes more and
        there is memory for an answer of about `nbytes`: one that is small to ask for may be large,
        and many may be released at once."""
        self._when_room = send
        self._room_bytes = nbytes
        if self._connection.order.is_first(self):
            self._connection.order.go_on()

    def is_answered(self) -> bool:
        return self.data is not None or self._when_room is not None

    def make(self) -> None:
        """Makes and sends the answer, as soon as there is memory for it."""
        send, self._when_room = self._when_room, None
        if send is not None:
            self._connection.order.answers.ask(self._room_bytes, partial(self._run, send))

    def _run(self, step: Callable[[], None]) -> None:
        """Runs a step of a handler that waited for this reply's turn. Every outcome is an answer,
        as in `RequestDispatch.handle`; one that is broken off ends the connection."""
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

    def is_wanted(self) -> bool:
        """False once the connection is gone."""
        return self in self._connection.order

    def when_first(self, then: Callable[[], None]) -> None:
        """Runs `then` when all replies before this one have left: a stream begins. Whatever is
        pipelined behind it waits."""
        self.is_stream = True
        self._when_first = then
        self._connection.order.block(1)
        self._connection.order.start_stream()

    def start_stream(self) -> None:
        then, self._when_first = self._when_first, None
        if then is not None:
            self._run(then)

    def open_stream(self, head: bytes) -> HttpConnection:
        """Sends the head of a chunked answer that goes on until one side ends it."""
        connection = self._connection
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the answer.
        connection.is_chunked = self.is_http_1_1
        self.keep_alive = self.keep_alive and connection.is_chunked
        connection.transport.write(
            b"HTTP/1.1 200 OK\r\n%b%b%bx-request-id: %b\r\n%b%b\r\n"
            % (
                connection.dispatch.date_header,
                head,
                self.cors_head,
                self._request_id,
                b"transfer-encoding: chunked\r\n" if connection.is_chunked else b"",
                b"" if self.keep_alive else CLOSE,
            )
        )
        return connection


class AppTurn:
    """A request of the ASGI app in its connection's order."""

    __slots__ = ("app", "cycle", "is_started")
    data = None  # the app writes its answer itself

    def __init__(self, cycle: Any, app: Any, cors_head: bytes = b"") -> None:
        cycle.default_headers = cycle.default_headers + header_pairs(cors_head)
        self.cycle = cycle
        self.app = app
        self.is_started = False


class ResponseOrder:
    """The queue of one connection. Turns start in order; `_waiting` are those that have not, and
    `_blockers` counts those of the app and streams that have, which hold up all that wait.
    `answers` is the connection's part of the memory for answers in progress."""

    __slots__ = (
        "_blockers",
        "_connection",
        "_is_asked",
        "_is_going_on",
        "_queue",
        "_waiting",
        "answers",
    )

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.answers = Claim(connection.dispatch.answers, connection.transport, self._is_answering)
        self._queue: deque[Reply | AppTurn] = deque()
        self._waiting: deque[Reply | AppTurn] = deque()
        self._blockers = 0
        self._is_going_on = False
        self._is_asked = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Reply | AppTurn]:
        return iter(self._queue)

    def __contains__(self, turn: object) -> bool:
        return turn in self._queue

    def add(self, turn: Reply | AppTurn) -> None:
        """A turn is added before it starts; `go_on` starts it when it may."""
        self._queue.append(turn)
        if isinstance(turn, AppTurn) or turn.request is not None or turn.on_start is not None:
            self._waiting.append(turn)

    def may_start(self) -> bool:
        """May a request that has just come start at once? By far the most do."""
        return not (self._waiting or self._blockers or self._connection.flow.write_paused)

    def add_started(self, reply: Reply) -> None:
        self._queue.append(reply)
        if len(self._queue) > MAX_PIPELINED:
            self._connection.flow.pause_reading()

    def clear(self) -> None:
        self._queue.clear()
        self._waiting.clear()
        self._blockers = 0

    def is_first(self, turn: Reply) -> bool:
        return bool(self._queue) and self._queue[0] is turn

    def block(self, change: int) -> None:
        """A reply has become a stream, or is none after all."""
        self._blockers += change

    def answered(self, reply: Reply) -> None:
        """The reply has its bytes: it leaves now, or after those before it."""
        queue = self._queue
        if queue and queue[0] is reply:
            queue.popleft()
            connection = self._connection
            self._write(reply)
            is_moving = bool(queue) and self._can_go_on()
            if is_moving or connection.flow.read_paused or connection.is_half_closed:
                self.go_on()

    def _write(self, reply: Reply) -> None:
        self._connection.write_reply(reply)
        if self.answers.held_bytes and not self._connection.flow.write_paused:
            self.answers.hold(0)

    def _is_answering(self) -> bool:
        """Is what the connection has to take an answer, and not a stream of events?"""
        stream = self._connection.stream
        return stream is None or stream.is_answer or self.answers.held_bytes > 0

    def writing_paused(self) -> None:
        self.answers.filled()

    def writing_resumed(self) -> None:
        """The answers before have been taken. A stream that is an answer says itself what it
        holds."""
        self.answers.drained()
        stream = self._connection.stream
        if stream is None or not stream.is_answer:
            self.answers.hold(0)

    def drop_waiting(self) -> None:
        """Forgets the requests that have not started."""
        for turn in self._waiting:
            self._queue.remove(turn)
            if isinstance(turn, Reply):
                self._connection.bodies.release(turn)
        self._waiting.clear()

    def disconnect_app(self) -> None:
        """Tells the app that the client is gone."""
        for turn in self._queue:
            if isinstance(turn, AppTurn):
                turn.cycle.disconnected = True
                turn.cycle.message_event.set()

    def has_stream(self) -> bool:
        """Is there a stream, even if it has not begun?"""
        return any(isinstance(turn, Reply) and turn.is_stream for turn in self._queue)

    def end_after_last(self) -> None:
        """The connection ends with the last answer that is due."""
        last = self._queue[-1]
        if isinstance(last, AppTurn):
            last.cycle.keep_alive = False
        else:
            last.keep_alive = False

    def _can_go_on(self) -> bool:
        """May be there is a turn to start, or the first one's answer to write."""
        if self._waiting or self._blockers:
            return True
        first = self._queue[0]
        return isinstance(first, Reply) and first.is_answered()

    def app_is_done(self) -> None:
        if self._queue and isinstance(self._queue[0], AppTurn):
            self._queue.popleft()
            self._blockers -= 1
        self.go_on()

    def stream_is_done(self) -> None:
        """The stream that was first has ended. Its head promised what becomes of the connection:
        one that is closed unannounced may meet the client's next request on its way."""
        turn = self._queue.popleft()
        self._blockers -= 1
        if isinstance(turn, Reply) and not turn.keep_alive:
            self._connection.finish()
        else:
            self.go_on()

    def go_on(self) -> None:
        """Writes what is answered and first, then starts what may start. An answer given or a turn
        started here asks for the same again: the loop that is running serves it, so that a long
        pipeline does not nest."""
        self._is_asked = True
        if self._is_going_on:
            return
        self._is_going_on = True
        try:
            while self._is_asked:
                self._is_asked = False
                if not self._write_answered():
                    return
                self.start_stream()
                self._advance()
        finally:
            self._is_going_on = False
        self._connection.turns_moved()

    def _write_answered(self) -> bool:
        """False when the first answer is large and the connection takes no more bytes."""
        queue, connection = self._queue, self._connection
        while queue and isinstance(first := queue[0], Reply) and first.is_answered():
            if first.data is not None:
                queue.popleft()
                self._write(first)
            elif connection.flow.write_paused:
                return False
            else:
                first.make()
        return True

    def start_stream(self) -> None:
        if self._queue and isinstance(self._queue[0], Reply):
            self._queue[0].start_stream()

    def _advance(self) -> None:
        while self._waiting and self._may_next_start():
            turn = self._waiting.popleft()
            if isinstance(turn, AppTurn):
                self._blockers += 1
            elif turn.on_start is not None:
                turn.on_start()
                continue
            self._connection.start_turn(turn)

    def _may_next_start(self) -> bool:
        """Does nothing hold up the first turn that has not started?"""
        if self._blockers or self._connection.flow.write_paused:
            return False
        turn = self._waiting[0]
        return isinstance(turn, Reply) or turn is self._queue[0]
