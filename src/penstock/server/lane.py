"""One connection: uvicorn's HTTP/1.1 with the data plane answered inside the protocol.

A task and a future per request are what costs; so requests of the lane are answered by a plain
call, and their replies written by the commit that makes them durable. All other requests go the
way uvicorn sends them, to the ASGI app. The order of answers is kept in turns.py.

Invariants: headers and bodies past their limits are refused before they are held; once a request
is refused with its rest unread, nothing that follows on the connection is understood.

uvicorn's internals are used here and nowhere else; tests/unit/test_uvicorn_seam.py fails when
they move.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_HEADER_BYTES, MIB
from penstock.server.felix import upgrade
from penstock.server.gate import Verdict
from penstock.server.heads import Ordinary
from penstock.server.hub import Hub
from penstock.server.requests import Request, origin_form
from penstock.server.turns import MAX_PIPELINED, AppTurn, Reply, Turns

MAX_WAITING_BYTES = MIB
"""Bodies of one connection that wait for their turn; beyond it, reading stops."""

LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, of what a refused client still sends is read and thrown away."""


class Lane(HttpToolsProtocol):
    hub: ClassVar[Hub]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.turns = Turns(self)
        self.stream: Any = None
        self.is_chunked = True
        self.touched = time.monotonic()
        self.is_receiving = False
        self._began = self.touched
        self._begun = self._thrown_bytes = self._framing_bytes = 0
        self._first: Ordinary | None = None
        self._in_head = self._has_progress = False
        self._body: list[bytes] = []
        self._body_bytes = self._waiting_bytes = 0
        self._is_lane = self._is_upgrade = self._is_welcome = False
        self._reply: Reply | None = None
        self._refusal: PenstockError | None = None
        self._verdict = Verdict()
        self._verdict_headers: list[tuple[bytes, bytes]] | None = None
        self._is_deaf = self._is_done = self._is_leaving = False
        self.is_half_closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_done = self._is_deaf = True
        self._drop_body()
        for turn in self.turns:
            if isinstance(turn, AppTurn):
                turn.cycle.disconnected = True
                turn.cycle.message_event.set()
        self._drop_turns()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.disconnected()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its side and still read its answers; not one that streams."""
        self.is_half_closed = True
        return bool(self.turns) and self.stream is None

    def is_idle(self) -> bool:
        return not self.turns and not self.is_receiving

    def is_overdue(self) -> bool:
        """The rest of a request should have come by now; a byte now and then does not count."""
        return self.is_receiving and self.hub.is_overdue(self._began, self._body_bytes)

    # -- what comes in -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._throw_away(data)
            return
        self.touched = time.monotonic()
        if self.is_receiving:
            self._parse(data)
            return
        if rest := data[self._take_known(data) :]:
            self._begun, self._first = 0, None
            self._parse(rest)
            if not self._is_deaf:
                self.hub.heads.keep(rest, self._first)

    def _take_known(self, data: bytes) -> int:
        """Starts the requests whose heads were understood before; how far they go."""
        at = 0
        while at < len(data) and self.turns.may_start():
            found = self.hub.heads.request_at(data, at)
            if found is None:
                break
            request, at = found
            self._start(request, Reply(self, self.hub.next_request_id(), keep_alive=True))
        return at

    def _start(self, request: Request, reply: Reply) -> None:
        self.turns.add_started(reply)
        self.hub.handle(request, reply)

    def _parse(self, data: bytes) -> None:
        self._has_progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            self._upgrade(data[wish.args[0] :])
        except httptools.HttpParserError as error:
            self.refuse(InvalidArgument(f"not an HTTP/1.1 request: {error}"))
        if self.is_receiving and not self._has_progress:
            self._count_framing(len(data))

    def _count_framing(self, nbytes: int) -> None:
        """Bytes that brought neither a new request nor any of its body: heads, trailers, chunk
        extensions. The parser holds what is not complete, so this is bounded by the read."""
        self._framing_bytes += nbytes
        if self._framing_bytes > MAX_HEADER_BYTES:
            self.refuse(InvalidArgument(f"headers are over {MAX_HEADER_BYTES} bytes"))

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.is_receiving = True
        self._began = self.touched
        self._begun += 1
        self._in_head = True
        self._has_progress = True
        self._framing_bytes = 0
        self._refusal = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._is_deaf:
            return
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.refuse(InvalidArgument("this is no proxy"))
            return
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_upgrade:
            return
        if self.headers != self._verdict_headers:
            self._judge()
        verdict = self._verdict
        path, _, query = self.url.partition(b"?")
        if self._is_welcome and path[:4] == b"/v1/" and len(self.url) <= MAX_HEADER_BYTES:
            self._is_lane = True
            request_id = verdict.request_id or self.hub.next_request_id()
            reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
            reply.request = Request(method, path, query, verdict.wants_events)
            # One that is chunked, or names itself, is not the same when its head comes again.
            is_odd = verdict.is_chunked or verdict.request_id or not reply.keep_alive
            if self._begun == 1 and not is_odd:
                self._first = Ordinary(method, self.url, verdict)
            return
        self._receive_with_care(method, verdict)

    def _judge(self) -> None:
        """The same headers again, as a client sends them that asks often, need no second look."""
        self._verdict_headers = self.headers
        version = self.parser.get_http_version()
        verdict = self._verdict = self.hub.gate.judge(self.headers, version)
        is_short = verdict.content_length <= self.hub.max_body_bytes
        self._is_welcome = verdict.is_welcome() and is_short and version == "1.1"

    def _receive_with_care(self, method: bytes, verdict: Verdict) -> None:
        """Whatever is not an ordinary request of the lane."""
        path, _, query = origin_form(self.url).partition(b"?")
        refusal = self.hub.refusal_of(verdict, path, self.url)
        if refusal is None and self.hub.is_app_path(path):
            self._is_lane = False
            self._hand_to_app()
            return
        self._is_lane = True
        request_id = verdict.request_id or self.hub.next_request_id()
        reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
        reply.path = path
        if refusal is not None:
            reply.is_head = method == b"HEAD"
            # Without a body the request ends here, and the connection can go on.
            if verdict.content_length or verdict.is_chunked:
                self.refuse(refusal)
            else:
                self._refusal = refusal
            return
        if verdict.expects_continue and not self.turns:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reply.is_http_1_1 = self.parser.get_http_version() == "1.1"
        reply.request = Request(method, path, query, verdict.wants_events)

    def on_body(self, body: bytes) -> None:
        if self._is_deaf or self._is_upgrade:
            return
        self._has_progress = True
        self._framing_bytes = 0
        if not self._is_lane:
            super().on_body(body)
            return
        self._body.append(body)
        self._body_bytes += len(body)
        self.hub.body_bytes += len(body)
        if self._body_bytes > self.hub.max_body_bytes:
            self.refuse(self.hub.too_large(self._body_bytes))
        elif self.hub.body_bytes > self.hub.max_bodies_bytes and len(self._body) > 1:
            self.refuse(self.hub.too_many_bodies())

    def on_message_complete(self) -> None:
        if self._is_deaf or self._is_upgrade:
            return
        self.is_receiving = False
        if not self._is_lane:
            super().on_message_complete()
            return
        reply, self._reply = self._reply, None
        if reply is None:
            return
        request, body = reply.request, self._body
        if request is not None and body:
            request.body = body[0] if len(body) == 1 else b"".join(body)
        if request is not None and self.turns.may_start():
            self._drop_body()
            reply.request = None
            self._start(request, reply)
        else:
            self._wait_for_turn(reply)

    def _wait_for_turn(self, reply: Reply) -> None:
        reply.held_bytes = self._body_bytes
        self._waiting_bytes += self._body_bytes
        self._body = []
        self._body_bytes = 0
        self.turns.add(reply)
        if self._refusal is not None:
            reply.send_error(self._refusal)
        else:
            self.turns.go_on()
        if self._is_full():
            self.flow.pause_reading()

    # -- what goes out -----------------------------------------------------------------------

    def start_turn(self, turn: Reply | AppTurn) -> None:
        if isinstance(turn, AppTurn):
            turn.is_started = True
            super()._start_asgi_task(turn.cycle, turn.app)
        elif turn.request is not None:
            request, turn.request = turn.request, None
            self._release(turn)
            self.hub.handle(request, turn)

    def write_reply(self, reply: Reply) -> None:
        if reply.data is not None and not self._is_done:
            self.transport.write(reply.data)
            if not reply.keep_alive:
                self.finish()

    def turns_moved(self) -> None:
        """Some answers have left: there is room for more requests, or none are to come."""
        if self._is_done:
            return
        if self.is_half_closed and not self.turns:
            self.finish()
        elif not self._is_full() and not self.flow.write_paused:
            self.flow.resume_reading()

    def _is_full(self) -> bool:
        is_crowded = len(self.turns) > MAX_PIPELINED or self._waiting_bytes > MAX_WAITING_BYTES
        return is_crowded or self._is_leaving

    def write_chunk(self, body: bytes | memoryview) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(body), body) if self.is_chunked else body)

    def end_stream(self) -> None:
        """The broker ends the stream; a client sees a complete answer, and may ask again."""
        if not self._is_done:
            self.stream = None
            self.touched = time.monotonic()
            if self.is_chunked:
                self.transport.write(b"0\r\n\r\n")
            self.turns.stream_is_done()

    def break_stream(self) -> None:
        """The stream cannot go on; a client sees that it is not complete."""
        self.stream = None
        self.transport.abort()

    def refuse(self, error: PenstockError) -> None:
        """Answers an error in its turn, then ends the connection; what follows is not read."""
        if self._is_deaf:
            return
        self._is_deaf = True
        self.is_receiving = False
        self._drop_body()
        reply, self._reply = self._reply, None
        if reply is None:
            reply = Reply(self, self.hub.next_request_id(), keep_alive=False)
        if reply.request is not None:
            reply.path, reply.request = reply.request.path, None
        reply.keep_alive = False
        self.turns.add(reply)
        reply.send_error(error)
        self.turns.go_on()

    def _throw_away(self, data: bytes) -> None:
        self._thrown_bytes += len(data)
        if self._thrown_bytes > LINGER_BYTES:
            self.transport.close()

    def finish(self) -> None:
        is_refused, self._is_deaf, self._is_done = self._is_deaf, True, True
        self._drop_body()
        self._drop_turns()
        if is_refused and self.transport.can_write_eof():
            # Closing on unread bytes would reset the connection, and the answer with it.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _drop_body(self) -> None:
        self.hub.body_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

    def _drop_turns(self) -> None:
        for turn in self.turns:
            if isinstance(turn, Reply):
                self._release(turn)
        self.turns.clear()

    def _release(self, reply: Reply) -> None:
        self.hub.body_bytes -= reply.held_bytes
        self._waiting_bytes -= reply.held_bytes
        reply.held_bytes = 0

    # -- taking turns with the app -------------------------------------------------------------

    def _hand_to_app(self) -> None:
        """uvicorn builds its scope from what was parsed here, as if it had parsed it itself."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = origin_form(url)
        self.headers.extend(headers)
        self.expect_100_continue = self._verdict.expects_continue
        # Order is kept here; to uvicorn every request looks like the first.
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.turns.add(AppTurn(cycle, app))
        self.turns.go_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The hub ends silent connections; uvicorn's timer knows nothing of streams.
        self._unset_keepalive_if_required()
        self.turns.app_is_done()

    def _upgrade(self, rest: bytes) -> None:
        """A WebSocket is granted, in its turn; other requests are read again without their wish."""
        if self._is_deaf:
            return
        path = origin_form(self.url).partition(b"?")[0]
        if upgrade.is_socket_wanted(self.parser.get_method(), path, self.headers):
            self._judge()
            if self._is_welcome:
                self._grant_socket(path, rest)
                return
        head = upgrade.without_upgrade(self.parser.get_method(), self.url, self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(head + rest)

    def _grant_socket(self, path: bytes, rest: bytes) -> None:
        request_id = self._verdict.request_id or self.hub.next_request_id()
        reply = self._reply = Reply(self, request_id, keep_alive=True)
        reply.path = path
        try:
            handshake = upgrade.read_handshake(self.headers, self._verdict)
        except PenstockError as error:
            self.refuse(error)
            return
        self._reply = None
        self.is_receiving = False
        self._is_leaving = True
        self.flow.pause_reading()
        self.turns.add(reply)
        reply.when_first(partial(upgrade.hand_over, self, handshake, request_id, rest))

    def retire(self) -> None:
        """The connection is another protocol's from now on."""
        self._is_done = self._is_deaf = True
        self._drop_turns()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self.flow.resume_reading()

    # -- flow and end ----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        if self.stream is not None:
            self.stream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stream is not None:
            self.stream.resume()
        self.turns.go_on()

    def shutdown(self) -> None:
        """What is under way is answered; nothing more is understood."""
        self._is_deaf = True
        if not self.turns:
            self.transport.close()
            return
        last = self.turns.last()
        if isinstance(last, AppTurn):
            last.cycle.keep_alive = False
        else:
            last.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        self.refuse(InvalidArgument(msg))
