"""One connection: uvicorn's HTTP/1.1 with the data plane answered inside the protocol.

A task and a future per request are what costs; so requests of the API are answered by a plain
call, and their replies written by the commit that makes them durable. All other requests go the
way uvicorn sends them, to the ASGI app. The order of answers is kept in response_order.py.

Invariants: headers and bodies past their limits are refused before they are held; once a request
is refused with its rest unread, or was the last, nothing that follows on it is understood; the
parser says where a request ends, and a body of another length than announced is refused.

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
from penstock.server.http.admission import RequestVerdict, check_request_line
from penstock.server.http.bodies import RequestBodies
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.head_cache import CacheableRequest
from penstock.server.http.requests import REQUEST_ID, Request, origin_form
from penstock.server.http.response_order import MAX_PIPELINED, AppTurn, Reply, ResponseOrder
from penstock.server.websocket import upgrade

MAX_WAITING_BYTES = MIB
"""RequestBodies of one connection that wait for their turn; beyond it, reading stops."""

LINGER_S = 1.0
LINGER_BYTES = MIB
"""How long, and how much, of what a refused client still sends is read and thrown away."""


class HttpConnection(HttpToolsProtocol):
    dispatch: ClassVar[RequestDispatch]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.order = ResponseOrder(self)
        self.stream: Any = None
        self.is_chunked = True
        self.touched = self._began = time.monotonic()
        self.is_receiving = False
        self._begun = self._thrown_bytes = self._framing_bytes = 0
        self._first: CacheableRequest | None = None
        self._in_head = self._has_progress = self._is_lane = self._is_upgrade = False
        self.bodies = RequestBodies(self.dispatch)
        self._reply: Reply | None = None
        self._refusal: PenstockError | None = None
        self._admissions = self.dispatch.new_admission_cache()
        self._is_deaf = self._is_done = self._is_leaving = self._is_last = False
        self._is_ordinary = self.is_half_closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_done = self._is_deaf = True
        self.bodies.drop()
        self.order.disconnect_app()
        self._drop_turns()
        self.order.answers.close()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.disconnected()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its side and still read its answers; not one that streams."""
        self.is_half_closed = True
        return bool(self.order) and self.stream is None

    def is_idle(self) -> bool:
        return not self.order and not self.is_receiving

    def is_overdue(self) -> bool:
        """The rest of a request should have come by now; a byte now and then does not count."""
        return self.is_receiving and self.dispatch.is_overdue(self._began, self.bodies.nbytes)

    # -- what comes in -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._throw_away(data)
            return
        if self._is_last:
            return
        self.touched = time.monotonic()
        try:
            if self.is_receiving:
                self._parse(data)
            elif rest := data[self._take_known(data) :]:
                self._begun, self._first = 0, None
                self._parse(rest)
                self.dispatch.head_cache.keep(rest, self._first)
        except Exception as error:  # noqa: BLE001 - the last resort, logged and answered
            self.refuse(self.dispatch.defect(error, self.url))

    def _take_known(self, data: bytes) -> int:
        """Starts the requests whose heads were understood before; how far they go."""
        at = 0
        while at < len(data) and self.order.may_start():
            found = self.dispatch.head_cache.request_at(data, at)
            if found is None:
                break
            request, at = found
            self._start(request, Reply(self, self.dispatch.next_request_id(), keep_alive=True))
        return at

    def _start(self, request: Request, reply: Reply) -> None:
        self.order.add_started(reply)
        self.dispatch.handle(request, reply)

    def _parse(self, data: bytes) -> None:
        self._has_progress = False
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            self.refuse(self.dispatch.defect(error.__context__ or error, self.url))
        except httptools.HttpParserError as error:
            self.refuse(InvalidArgument(f"not an HTTP/1.1 request: {error}"))
        if self.is_receiving and not self._has_progress:
            self._count_framing(len(data))

    def _feed(self, data: bytes) -> None:
        """Feeds the parser. It stops at each wish for another protocol, of which a read may hold
        many; such a request is read again without it, unless it is granted."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as wish:
                rest = rest[wish.args[0] :]
            if self._is_deaf or self._is_socket_granted(rest):
                return
            head = upgrade.without_upgrade(self.parser, self.url, self.headers)
            self.parser = upgrade.new_parser(self)
            self.parser.feed_data(head)

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
        self._is_ordinary = False

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
        version = self.parser.get_http_version()
        refusal = check_request_line(method, version)
        if refusal is not None:
            self.refuse(refusal)
            return
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_upgrade:
            return
        admission = self._admissions
        if not admission.is_known(self.headers, version):
            admission.judge(self.headers, version)
        verdict = admission.verdict
        path, _, query = self.url.partition(b"?")
        if admission.is_welcome and path[:4] == b"/v1/" and len(self.url) <= MAX_HEADER_BYTES:
            self._is_lane = True
            request_id = self.dispatch.request_id_of(verdict)
            reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
            reply.cors_head = verdict.notes.cors_head
            reply.request = Request(method, path, query, verdict.notes)
            # One that is chunked, or names itself, is not the same when its head comes again.
            is_odd = verdict.is_chunked or verdict.request_id or not reply.keep_alive
            self._is_ordinary = self._begun == 1 and not is_odd
            return
        self._receive_with_care(method, verdict, version)

    def _receive_with_care(self, method: bytes, verdict: RequestVerdict, version: str) -> None:
        """Whatever is not an ordinary request of the connection."""
        path, _, query = origin_form(self.url).partition(b"?")
        refusal = self.dispatch.refusal_of(verdict, path, self.url, method)
        if refusal is None and self.dispatch.is_for_app(path, method, verdict):
            self._is_lane = False
            self._hand_to_app(verdict)
            return
        self._is_lane = True
        request_id = self.dispatch.request_id_of(verdict)
        reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
        reply.path = path
        reply.cors_head = verdict.notes.cors_head
        if refusal is not None:
            reply.is_head = method == b"HEAD"
            # Without a body the request ends here, and the connection can go on.
            if verdict.has_body():
                self.refuse(refusal)
            else:
                self._refusal = refusal
            return
        if verdict.expects_continue and not self.order:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reply.is_http_1_1 = version == "1.1"
        reply.request = Request(method, path, query, verdict.notes)

    def on_body(self, body: bytes) -> None:
        if self._is_deaf or self._is_upgrade:
            return
        self._has_progress = True
        self._framing_bytes = 0
        if not self._is_lane:
            super().on_body(body)
            return
        refusal = self.bodies.add(body)
        if refusal is not None:
            self.refuse(refusal)

    def on_message_complete(self) -> None:
        if self._is_deaf or self._is_upgrade:
            return
        self.is_receiving = False
        self._is_last = not self.parser.should_keep_alive()
        if not self._is_lane:
            super().on_message_complete()
            return
        verdict = self._admissions.verdict
        if self.bodies.nbytes != verdict.content_length and not verdict.is_chunked:
            self.refuse(InvalidArgument("the body is not as long as Content-Length says"))
            return
        reply, self._reply = self._reply, None
        if reply is None:
            return
        request = reply.request
        if request is not None:
            request.body = self.bodies.whole()
            if self._is_ordinary:
                self._first = CacheableRequest(self.url, self.headers, request)
        if request is not None and self.order.may_start():
            self.bodies.drop()
            reply.request = None
            self._start(request, reply)
        else:
            self._wait_for_turn(reply)

    def _wait_for_turn(self, reply: Reply) -> None:
        self.bodies.hold(reply)
        self.order.add(reply)
        if self._refusal is not None:
            reply.send_error(self._refusal)
        else:
            self.order.go_on()
        if self._is_full():
            self.flow.pause_reading()

    # -- what goes out -----------------------------------------------------------------------

    def start_turn(self, turn: Reply | AppTurn) -> None:
        if isinstance(turn, AppTurn):
            turn.is_started = True
            super()._start_asgi_task(turn.cycle, turn.app)
        elif turn.request is not None:
            request, turn.request = turn.request, None
            self.bodies.release(turn)
            self.dispatch.handle(request, turn)

    def write_reply(self, reply: Reply) -> None:
        if reply.data is not None and not self._is_done:
            self.transport.write(reply.data)
            if not reply.keep_alive:
                self.finish()

    def turns_moved(self) -> None:
        """Some answers have left: there is room for more requests, or none are to come."""
        if self._is_done:
            return
        if self.is_half_closed and not self.order:
            self.finish()
        elif not self._is_full() and not self.flow.write_paused:
            self.flow.resume_reading()

    def _is_full(self) -> bool:
        is_crowded = (
            len(self.order) > MAX_PIPELINED or self.bodies.waiting_bytes > MAX_WAITING_BYTES
        )
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
            self.order.stream_is_done()

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
        self.bodies.drop()
        reply, self._reply = self._reply, None
        if reply is None:
            reply = Reply(self, self.dispatch.next_request_id(), keep_alive=False)
        if reply.request is not None:
            reply.path, reply.request = reply.request.path, None
        reply.keep_alive = False
        self.order.add(reply)
        reply.send_error(error)
        self.order.go_on()

    def _throw_away(self, data: bytes) -> None:
        self._thrown_bytes += len(data)
        if self._thrown_bytes > LINGER_BYTES:
            self.transport.close()

    def finish(self) -> None:
        is_refused, self._is_deaf, self._is_done = self._is_deaf, True, True
        self.bodies.drop()
        self._drop_turns()
        if is_refused and self.transport.can_write_eof():
            # Closing on unread bytes would reset the connection, and the answer with it.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _drop_turns(self) -> None:
        for turn in self.order:
            if isinstance(turn, Reply):
                self.bodies.release(turn)
        self.order.clear()

    # -- taking turns with the app -------------------------------------------------------------

    def _hand_to_app(self, verdict: RequestVerdict) -> None:
        """uvicorn builds its scope from what was parsed here, as if it had parsed it itself."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = origin_form(url)
        self.headers.extend(headers)
        self.scope["state"][REQUEST_ID] = self.dispatch.request_id_of(verdict)
        self.expect_100_continue = verdict.expects_continue
        # Order is kept here; to uvicorn every request looks like the first.
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.order.add(AppTurn(cycle, app, self._admissions.verdict.notes.cors_head))
        self.order.go_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The dispatch ends silent connections; uvicorn's timer knows nothing of streams.
        self._unset_keepalive_if_required()
        self.order.app_is_done()

    def _is_socket_granted(self, rest: memoryview) -> bool:
        """Gives the connection and `rest` to a WebSocket, in its turn, if that may be."""
        path = origin_form(self.url).partition(b"?")[0]
        if not upgrade.is_socket_wanted(self.parser.get_method(), path, self.headers):
            return False
        verdict = self._admissions.judge(self.headers, self.parser.get_http_version())
        if not self._admissions.is_welcome:
            return False
        request_id = self.dispatch.request_id_of(verdict)
        reply = self._reply = Reply(self, request_id, keep_alive=True)
        reply.path = path
        try:
            handshake = upgrade.read_handshake(self.headers, verdict)
        except PenstockError as error:
            self.refuse(error)
            return True
        self._reply = None
        self.is_receiving = False
        self._is_leaving = True
        self.flow.pause_reading()
        hand_over = partial(upgrade.hand_over, self, handshake, request_id, bytes(rest))
        reply.on_start = partial(reply.when_first, hand_over)
        self.order.add(reply)
        self.order.go_on()
        return True

    def retire(self) -> None:
        """The connection is another protocol's from now on."""
        self._is_done = self._is_deaf = True
        self._drop_turns()
        self.order.answers.close()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self.flow.resume_reading()

    # -- flow and end ----------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        self.order.writing_paused()
        if self.stream is not None:
            self.stream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.order.writing_resumed()
        if self.stream is not None:
            self.stream.resume()
        self.order.go_on()

    def shutdown(self) -> None:
        """What is under way is answered; nothing more is understood."""
        self._is_deaf = True
        if not self.order:
            self.transport.close()
            return
        self.order.end_after_last()

    def send_400_response(self, msg: str) -> None:
        self.refuse(InvalidArgument(msg))
