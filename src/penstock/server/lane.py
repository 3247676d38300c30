"""One connection: uvicorn's HTTP/1.1 with the data plane answered inside the protocol.

A task and a future per request are what costs; so requests of the lane are answered by a plain
call, and their replies written by the commit that makes them durable. All other requests go the
way uvicorn sends them, to the ASGI app.

Invariants: replies leave in the order of their requests, whichever side answers them; a request
of the app or a stream starts when all before it are answered, and holds up those behind it.
Headers and bodies over their limits are refused before memory is taken for them.

uvicorn's internals are used here and nowhere else; tests/unit/test_uvicorn_seam.py fails when
they move.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import MAX_HEADER_BYTES, MIB
from penstock.server.gate import Verdict
from penstock.server.hub import Hub
from penstock.server.requests import Request, origin_form
from penstock.server.turns import AppTurn, Reply

MAX_PIPELINED = 64
"""Requests of one connection under way; beyond it, reading stops until some are answered."""

LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, of what a refused client still sends is read and thrown away."""


class Lane(HttpToolsProtocol):
    hub: ClassVar[Hub]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.touched = time.monotonic()
        self.is_receiving = False
        self._began = self.touched
        self._in_head = False
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._is_lane = False
        self._refusal: PenstockError | None = None
        self._verdict: Verdict | None = None
        self._verdict_headers: list[tuple[bytes, bytes]] = []
        self._turns: deque[Reply | AppTurn] = deque()
        self._blocking = 0
        self._is_done = False
        self._is_advancing = False
        self._is_lingering = False
        self._thrown_bytes = 0
        self._reply: Reply | None = None
        self.stream: Any = None
        self.is_chunked = True

    def is_waiting_for(self, reply: Reply) -> bool:
        return reply in self._turns

    def waiting_since(self) -> float:
        """Since when the rest of the request is awaited. Headers are to come as a whole: a byte
        now and then does not count."""
        return self._began if self._in_head else self.touched

    def is_idle(self) -> bool:
        return not self._turns and not self.is_receiving

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_done = True
        self._drop_body()
        for turn in self._turns:
            if isinstance(turn, AppTurn):
                turn.cycle.disconnected = True
                turn.cycle.message_event.set()
        self._turns.clear()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.disconnected()
        super().connection_lost(exc)

    # -- what comes in -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_done:
            self._throw_away(data)
            return
        self.touched = time.monotonic()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError as error:
            self.refuse(InvalidArgument(f"not an HTTP/1.1 request: {error}"))
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse_head()

    def _throw_away(self, data: bytes) -> None:
        self._thrown_bytes += len(data)
        if self._thrown_bytes > LINGER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self.is_receiving = True
        self._began = self.touched
        self._in_head = True
        self._head_bytes = 0
        self._refusal = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        headers = self.headers
        if headers != self._verdict_headers:
            self._verdict_headers = headers
            self._verdict = self.hub.gate.judge(headers, self.parser.get_http_version())
        verdict = self._verdict
        if verdict is None or self._is_done:
            return
        path, _, query = origin_form(self.url).partition(b"?")
        keep_alive = self.parser.should_keep_alive()
        reply = Reply(self, verdict.request_id or self.hub.next_request_id(), keep_alive)
        refusal = verdict.refusal
        if verdict.needs_token and path not in self.hub.open_paths:
            refusal = refusal or verdict.token_refusal
        if verdict.content_length > self.hub.max_body_bytes:
            refusal = refusal or TooLarge(
                f"the body is {verdict.content_length} bytes; "
                f"max_body_bytes is {self.hub.max_body_bytes}"
            )
        if refusal is None and self.hub.is_app_path(path):
            self._is_lane = False
            self._hand_to_app()
            return
        self._is_lane = True
        self._reply = reply
        if refusal is not None:
            self._refusal = refusal
            # What follows is not read; without a body the connection can go on.
            if verdict.content_length or verdict.is_chunked:
                self.refuse(refusal)
            return
        if verdict.expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reply.is_http_1_1 = self.parser.get_http_version() == "1.1"
        reply.request = Request(self.parser.get_method(), path, query)

    def on_body(self, body: bytes) -> None:
        if self._is_done:
            return
        if not self._is_lane:
            super().on_body(body)
            return
        self._body.append(body)
        self._body_bytes += len(body)
        self.hub.body_bytes += len(body)
        if self._body_bytes > self.hub.max_body_bytes:
            self.refuse(TooLarge(f"the body is over max_body_bytes, {self.hub.max_body_bytes}"))
        elif self.hub.body_bytes > self.hub.max_bodies_bytes and len(self._body) > 1:
            self.refuse(self.hub.too_many_bodies())

    def on_message_complete(self) -> None:
        if self._is_done:
            return
        self.is_receiving = False
        if not self._is_lane:
            super().on_message_complete()
            return
        reply, self._reply = self._reply, None
        if reply is None:
            return
        request = reply.request
        self._turns.append(reply)
        if request is None:
            if self._refusal is not None:
                reply.send_error(self._refusal)
            return
        if self._body:
            request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._drop_body()
        if self._blocking:
            self._limit_pipeline()
        else:
            reply.request = None
            self.hub.handle(request, reply)
            if len(self._turns) > MAX_PIPELINED:
                self.flow.pause_reading()

    # -- what goes out -----------------------------------------------------------------------

    def answered(self, reply: Reply) -> None:
        """The reply has its bytes: it leaves now, or after those before it."""
        turns = self._turns
        if not turns:
            return
        if turns[0] is reply and len(turns) == 1:
            turns.popleft()
            self._write(reply)
            if self.flow.read_paused and not self._is_done:
                self._advance()
            return
        while turns and isinstance(turns[0], Reply) and turns[0].data is not None:
            self._write(turns.popleft())
            if self._is_done:
                return
        if self._blocking or self.flow.read_paused:
            self.start_first()
            self._advance()

    def _write(self, reply: Any) -> None:
        self.transport.write(reply.data)
        if not reply.keep_alive:
            self._finish()

    def block(self, change: int) -> None:
        """A turn that others must wait for has come or gone."""
        self._blocking += change

    def start_first(self) -> None:
        if self._turns and isinstance(self._turns[0], Reply):
            self._turns[0].start()

    def write_chunk(self, body: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self.is_chunked else body)

    def end_stream(self) -> None:
        """The broker ends the stream; a client sees a complete answer."""
        if not self._is_done:
            self.stream = None
            if self.is_chunked:
                self.transport.write(b"0\r\n\r\n")
            self._finish()

    def refuse(self, error: PenstockError) -> None:
        """Answers an error that ends the connection; the rest of the request is not read."""
        if self._is_done:
            return
        self._drop_body()
        reply = Reply(self, self.hub.next_request_id(), keep_alive=False)
        self._reply = None
        self._turns.append(reply)
        self._is_lingering = True
        reply.send_error(error)

    def _refuse_head(self) -> None:
        self._in_head = False
        self.refuse(InvalidArgument(f"request line and headers are over {MAX_HEADER_BYTES} bytes"))

    def _finish(self) -> None:
        self._is_done = True
        self._turns.clear()
        if self._is_lingering and self.transport.can_write_eof():
            # Closing on unread bytes would reset the connection, and the answer with it.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _drop_body(self) -> None:
        self.hub.body_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

    # -- taking turns with the app -------------------------------------------------------------

    def _hand_to_app(self) -> None:
        """uvicorn builds its scope from what was parsed here, as if it had parsed it itself."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers)
        self.expect_100_continue = self._verdict is not None and self._verdict.expects_continue
        # Order is kept here; to uvicorn every request looks like the first.
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._turns.append(AppTurn(cycle, app))
        self._blocking += 1
        self._advance()

    def on_response_complete(self) -> None:
        if self._turns and isinstance(self._turns[0], AppTurn):
            self._turns.popleft()
            self._blocking -= 1
        super().on_response_complete()
        self._advance()

    def _advance(self) -> None:
        """Starts what may start now: all turns up to and with the first of the app or a stream."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while not self._is_done and (turn := self._next_turn()) is not None:
                if isinstance(turn, AppTurn):
                    turn.is_started = True
                    super()._start_asgi_task(turn.cycle, turn.app)
                elif turn.request is not None:
                    request, turn.request = turn.request, None
                    self.hub.handle(request, turn)
        finally:
            self._is_advancing = False
        if len(self._turns) <= MAX_PIPELINED and not self._is_done and not self.flow.write_paused:
            self.flow.resume_reading()

    def _next_turn(self) -> Reply | AppTurn | None:
        """The first turn that has not started, if nothing before it holds it up."""
        for turn in self._turns:
            if isinstance(turn, AppTurn):
                is_next = turn is self._turns[0] and not turn.is_started
                return turn if is_next else None
            if turn.is_stream:
                return None
            if turn.request is not None:
                return turn
        return None

    def _limit_pipeline(self) -> None:
        if len(self._turns) > MAX_PIPELINED:
            self.flow.pause_reading()

    def _upgrade(self) -> None:
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self.refuse(InvalidArgument("this path cannot be upgraded"))

    # -- flow and end ----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        if self.stream is not None:
            self.stream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()
        if self.stream is not None:
            self.stream.resume()

    def shutdown(self) -> None:
        if self.stream is None and not self._turns:
            self.transport.close()
            return
        for turn in self._turns:
            if isinstance(turn, Reply):
                turn.keep_alive = False
            else:
                turn.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        self.refuse(InvalidArgument(msg))
