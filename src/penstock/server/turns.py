"""The turns of a connection: each request's place in the order of answers.

Invariant: answers leave in the order of their requests, whoever gives them. A Reply is given by
the fast lane and may start while others before it are under way; an AppTurn, given by the ASGI
app, and a stream start when they are first, and hold up those behind them. Nothing starts while
the connection takes no more bytes, and no large answer is made then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.model.errors import PenstockError
from penstock.server.replies import (
    CLOSE,
    JSON_TYPE,
    STATUS_LINES,
    TYPED_PATHS,
    encode_json,
    error_body,
    error_head,
    typed_error,
)
from penstock.server.requests import Request

if TYPE_CHECKING:
    from penstock.server.lane import Lane


MAX_PIPELINED = 64
"""Requests of one connection under way; beyond it, reading stops until some are answered."""


class Reply:
    """The place of one answer in its connection's order."""

    __slots__ = (
        "_lane",
        "_request_id",
        "_when_first",
        "_when_room",
        "data",
        "held_bytes",
        "is_head",
        "is_http_1_1",
        "is_stream",
        "keep_alive",
        "path",
        "request",
    )

    def __init__(self, lane: Lane, request_id: bytes, keep_alive: bool) -> None:
        self._lane = lane
        self._request_id = request_id
        self.keep_alive = keep_alive
        self.is_head = False
        self.is_http_1_1 = True
        self.path = b""
        # Of a body that waits for its turn; counted towards what all connections may hold.
        self.held_bytes = 0
        self.is_stream = False
        self.data: bytes | None = None
        self.request: Request | None = None
        self._when_first: Callable[[], None] | None = None
        self._when_room: Callable[[], None] | None = None

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
        lane.turns.answered(self)

    def send_nothing(self) -> None:
        """204: no body, and no header that speaks of one."""
        lane = self._lane
        self.data = b"HTTP/1.1 204 No Content\r\n%bx-request-id: %b\r\n%b\r\n" % (
            lane.hub.date_header,
            self._request_id,
            b"" if self.keep_alive else CLOSE,
        )
        lane.turns.answered(self)

    def send_json(self, status: int, body: Any) -> None:
        self.send(status, encode_json(body))

    def send_error(self, error: PenstockError, request_id: str | int | None = None) -> None:
        """`request_id` is that of the body, if it had one."""
        if self.is_stream:
            self.is_stream = False
            self._lane.turns.block(-1)
        is_typed = self.path.startswith(TYPED_PATHS)
        body = typed_error(error, request_id=request_id) if is_typed else error_body(error)
        self.send(error.http_status, encode_json(body), JSON_TYPE + error_head(error))

    def settle(self, outcome: PenstockError | None) -> None:
        """For commands that answer 204 or an error."""
        if outcome is None:
            self.send_nothing()
        else:
            self.send_error(outcome)

    def when_room(self, send: Callable[[], None]) -> None:
        """Runs `send` when all replies before this one have left and the connection takes more:
        an answer that is small to ask for may be large, and many may be released at once."""
        self._when_room = send
        if self._lane.turns.is_first(self):
            self._lane.turns.go_on()

    def is_answered(self) -> bool:
        return self.data is not None or self._when_room is not None

    def make(self) -> None:
        """Sends what was not made yet, with which it leaves."""
        send, self._when_room = self._when_room, None
        if send is not None:
            send()

    def is_wanted(self) -> bool:
        """False once the connection is gone."""
        return self in self._lane.turns

    def when_first(self, then: Callable[[], None]) -> None:
        """Runs `then` when all replies before this one have left: a stream begins. Whatever is
        pipelined behind it waits."""
        self.is_stream = True
        self._when_first = then
        self._lane.turns.block(1)
        self._lane.turns.start_stream()

    def start_stream(self) -> None:
        then, self._when_first = self._when_first, None
        if then is not None:
            then()

    def open_stream(self, head: bytes) -> Lane:
        """Sends the head of a chunked answer that goes on until one side ends it."""
        lane = self._lane
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the answer.
        lane.is_chunked = self.is_http_1_1
        self.keep_alive = self.keep_alive and lane.is_chunked
        lane.transport.write(
            b"HTTP/1.1 200 OK\r\n%b%bx-request-id: %b\r\n%b%b\r\n"
            % (
                lane.hub.date_header,
                head,
                self._request_id,
                b"transfer-encoding: chunked\r\n" if lane.is_chunked else b"",
                b"" if self.keep_alive else CLOSE,
            )
        )
        return lane


class AppTurn:
    """A request of the ASGI app in its connection's order."""

    __slots__ = ("app", "cycle", "is_started")
    data = None  # the app writes its answer itself

    def __init__(self, cycle: Any, app: Any) -> None:
        self.cycle = cycle
        self.app = app
        self.is_started = False


class Turns:
    """The queue of one connection. `_waiting` counts the turns that have not started, and
    `_blockers` those of the app and streams, so that a long pipeline is not looked through."""

    __slots__ = ("_blockers", "_is_advancing", "_lane", "_queue", "_waiting")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._queue: deque[Reply | AppTurn] = deque()
        self._waiting = 0
        self._blockers = 0
        self._is_advancing = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Reply | AppTurn]:
        return iter(self._queue)

    def __contains__(self, turn: object) -> bool:
        return turn in self._queue

    def add(self, turn: Reply | AppTurn) -> None:
        """A turn is added before it starts; `go_on` starts it when it may."""
        self._queue.append(turn)
        if isinstance(turn, AppTurn):
            self._blockers += 1
            self._waiting += 1
        elif turn.request is not None:
            self._waiting += 1

    def may_start(self) -> bool:
        """May a request that has just come start at once? By far the most do."""
        return not (self._waiting or self._blockers or self._lane.flow.write_paused)

    def add_started(self, reply: Reply) -> None:
        self._queue.append(reply)
        if len(self._queue) > MAX_PIPELINED:
            self._lane.flow.pause_reading()

    def last(self) -> Reply | AppTurn:
        return self._queue[-1]

    def clear(self) -> None:
        self._queue.clear()
        self._waiting = self._blockers = 0

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
            lane = self._lane
            lane.write_reply(reply)
            is_moving = bool(queue) and self._can_go_on()
            if is_moving or lane.flow.read_paused or lane.is_half_closed:
                self.go_on()

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
            self._lane.finish()
        else:
            self.go_on()

    def go_on(self) -> None:
        """Writes what is answered and first, then starts what may start."""
        queue, lane = self._queue, self._lane
        while queue and isinstance(first := queue[0], Reply) and first.is_answered():
            if first.data is not None:
                queue.popleft()
                lane.write_reply(first)
            elif lane.flow.write_paused:
                return
            else:
                first.make()
        self.start_stream()
        if self._waiting:
            self._advance()
        lane.turns_moved()

    def start_stream(self) -> None:
        if self._queue and isinstance(self._queue[0], Reply):
            self._queue[0].start_stream()

    def _advance(self) -> None:
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._waiting and (turn := self._next()) is not None:
                self._waiting -= 1
                self._lane.start_turn(turn)
        finally:
            self._is_advancing = False

    def _next(self) -> Reply | AppTurn | None:
        """The first turn that has not started, if nothing holds it up."""
        if self._lane.flow.write_paused:
            return None
        if self._blockers:
            return self._next_before_blocker()
        return self._queue[-self._waiting]

    def _next_before_blocker(self) -> Reply | AppTurn | None:
        for turn in self._queue:
            if isinstance(turn, AppTurn):
                is_next = turn is self._queue[0] and not turn.is_started
                return turn if is_next else None
            if turn.is_stream:
                return None
            if turn.request is not None:
                return turn
        return None
