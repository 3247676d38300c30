"""One HTTP/1.1 connection: parses requests, starts them and writes their answers.

A task and a future per request would cost more than the request. So a request is answered by a
plain call, and the commit that makes it durable writes its reply. response_order.py keeps the
order of answers.

Invariants: headers and bodies past their limits are refused before they are held; after a request
that was refused with its rest unread, or that was the last, the connection handles no other; the
parser says where a request ends, and a body whose length is not the announced one is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableSet
from typing import Any

import httptools

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_HEADER_BYTES
from penstock.server.http.bodies import MAX_WAITING_BYTES, RequestBodies
from penstock.server.http.connection_slot import ConnectionSlot
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.flow import LINGER_BYTES, LINGER_S, FlowControl
from penstock.server.http.head_cache import CacheableRequest
from penstock.server.http.request_headers import Headers, RequestVerdict, check_request_line
from penstock.server.http.requests import Request, origin_form
from penstock.server.http.response_order import MAX_PIPELINED, Reply, ResponseOrder
from penstock.server.identity.credentials import certificate_of
from penstock.server.websocket import upgrade


class HttpConnection(asyncio.Protocol):
    """`connections` are all that the server has open. `stream` is the response that goes on until
    one side ends it, while there is one."""

    def __init__(self, dispatch: RequestDispatch, connections: MutableSet[Any]) -> None:
        self.dispatch = dispatch
        self.connections = connections
        self.loop = asyncio.get_running_loop()
        self.parser = upgrade.new_parser(self)
        self.transport: asyncio.Transport
        self.flow: FlowControl
        self.order: ResponseOrder
        self.bodies = RequestBodies(dispatch)
        self.stream: Any = None
        self.is_chunked = True
        self.is_half_closed = False
        self.touched = self._began = time.monotonic()
        self.admissions = dispatch.new_admission_cache()
        self.slot = ConnectionSlot(dispatch)
        # Of the request that is being received.
        self.is_receiving = False
        self._url = b""
        self._headers: Headers = []
        self._reply: Reply | None = None
        self._refusal: PenstockError | None = None
        self._is_in_head = self._wants_upgrade = self._is_cacheable = False
        # Of the read that is being parsed: requests that began, and whether it was of any use.
        self._read_requests = 0
        self._first_request: CacheableRequest | None = None
        self._has_progress = False
        self._framing_bytes = self._discarded_bytes = 0
        # No request is handled after the last one; input is discarded after a refusal; nothing is
        # written once the connection is closed, and nothing read while it becomes a WebSocket.
        self._is_last = self._is_discarding = self._is_closed = False
        self._hand_over: upgrade.HandOver | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.flow = FlowControl(self.transport)
        self.order = ResponseOrder(self)
        self.admissions.certificate = certificate_of(self.transport)
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = self._is_discarding = True
        self.connections.discard(self)
        self.slot.leave()
        self.bodies.drop()
        self.order.clear()
        self.order.answers.close()
        self._close_source()

    def eof_received(self) -> bool:
        """Keeps the connection for a client that still reads its answers, but not for a stream. TLS
        cannot close one direction alone."""
        self.is_half_closed = True
        if self.stream is not None and not self.flow.is_tls and self.stream.half_closed():
            return True
        is_kept = bool(self.order) and self.stream is None and not self.flow.is_tls
        self._close_source()
        return is_kept

    def is_idle(self) -> bool:
        return not self.order and not self.is_receiving

    def is_overdue(self) -> bool:
        """Returns whether the rest of a request should have come by now. A byte now and then does
        not count."""
        return self.is_receiving and self.dispatch.is_overdue(self._began, self.bodies.nbytes)

    # -- input ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            self._discard(data)
            return
        if self._is_last:
            return
        self.touched = time.monotonic()
        try:
            if self.is_receiving:
                self._parse(data)
            elif rest := data[self._start_cached(data) :]:
                self._read_requests, self._first_request = 0, None
                self._parse(rest)
                self.dispatch.head_cache.keep(rest, self._first_request)
        except Exception as error:  # noqa: BLE001 - the last resort, logged and answered
            self.refuse(self.dispatch.defect(error, self._url))

    def _start_cached(self, data: bytes) -> int:
        """Starts the requests whose heads are in the cache; returns where the last of them ends."""
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
        if request.notes.sender is self.slot.sender or self.slot.admits(request, reply):
            self.dispatch.handle(request, reply)

    def _parse(self, data: bytes) -> None:
        self._has_progress = False
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            self.refuse(self.dispatch.defect(error.__context__ or error, self._url))
        except httptools.HttpParserError as error:
            self.refuse(InvalidArgument(f"not an HTTP/1.1 request: {error}"))
        if self.is_receiving and not self._has_progress:
            self._count_framing(len(data))

    def _feed(self, data: bytes) -> None:
        """Feeds the parser. It stops at each request for an upgrade, of which a read may hold many;
        if the upgrade is not granted, the request is parsed again without it."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                rest = rest[stop.args[0] :]
            if self._is_discarding or self._is_socket_granted(rest):
                return
            head = upgrade.without_upgrade(self.parser, self._url, self._headers)
            self.parser = upgrade.new_parser(self)
            self.parser.feed_data(head)

    def _count_framing(self, nbytes: int) -> None:
        """Counts bytes that brought neither a new request nor any of its body: heads, trailers,
        chunk extensions. The parser holds what is not complete, so its memory is bounded here."""
        self._framing_bytes += nbytes
        if self._framing_bytes > MAX_HEADER_BYTES:
            self.refuse(InvalidArgument(f"headers are over {MAX_HEADER_BYTES} bytes"))

    # -- called by the parser --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self.is_receiving = True
        self._began = self.touched
        self._read_requests += 1
        self._is_in_head = self._has_progress = True
        self._framing_bytes = 0
        self._refusal = None
        self._is_cacheable = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_discarding:
            return
        method = self.parser.get_method()
        version = self.parser.get_http_version()
        refusal = check_request_line(method, version)
        if refusal is not None:
            self.refuse(refusal)
            return
        self._wants_upgrade = self.parser.should_upgrade()
        if self._wants_upgrade:
            return
        admission = self.admissions
        if not admission.is_known(self._headers, version):
            admission.judge(self._headers, version)
        verdict = admission.verdict
        path, _, query = self._url.partition(b"?")
        if admission.is_welcome and path[:4] == b"/v1/" and len(self._url) <= MAX_HEADER_BYTES:
            request_id = self.dispatch.request_id_of(verdict)
            reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
            reply.cors_head = verdict.notes.cors_head
            reply.request = Request(method, path, query, verdict.notes)
            # Chunked, with its own id, or from a certificate: the same head may mean another thing.
            is_odd = verdict.is_chunked or verdict.request_id or verdict.is_of_connection
            self._is_cacheable = self._read_requests == 1 and reply.keep_alive and not is_odd
            return
        self._receive_unusual(method, verdict, version)

    def _receive_unusual(self, method: bytes, verdict: RequestVerdict, version: str) -> None:
        """Receives a request that may be refused, is not HTTP/1.1, waits for 100 Continue, or is
        not for /v1."""
        path, _, query = origin_form(self._url).partition(b"?")
        refusal = self.dispatch.refusal_of(verdict, path, self._url, method)
        request_id = self.dispatch.request_id_of(verdict)
        reply = self._reply = Reply(self, request_id, self.parser.should_keep_alive())
        reply.path = path
        reply.cors_head = verdict.notes.cors_head
        if refusal is not None:
            reply.is_head = method == b"HEAD"
            # Without a body the request ends here, and the connection can be used again.
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
        if self._is_discarding or self._wants_upgrade:
            return
        self._has_progress = True
        self._framing_bytes = 0
        refusal = self.bodies.add(body)
        if refusal is not None:
            self.refuse(refusal)

    def on_message_complete(self) -> None:
        if self._is_discarding or self._wants_upgrade:
            return
        self.is_receiving = False
        self._is_last = not self.parser.should_keep_alive()
        verdict = self.admissions.verdict
        if self.bodies.nbytes != verdict.content_length and not verdict.is_chunked:
            self.refuse(InvalidArgument("the body is not as long as Content-Length says"))
            return
        reply, self._reply = self._reply, None
        if reply is None:
            return
        request = reply.request
        if request is not None:
            request.body = self.bodies.whole()
            if self._is_cacheable:
                self._first_request = CacheableRequest(self._url, self._headers, request)
        if request is not None and self.order.may_start():
            self.bodies.drop()
            reply.request = None
            self._start(request, reply)
        else:
            self._start_later(reply)

    def _start_later(self, reply: Reply) -> None:
        self.bodies.hold(reply)
        if self._refusal is not None:
            self.order.add(reply)
            reply.send_error(self._refusal)
        else:
            self.order.add_waiting(reply)
            self.order.advance()
        if self._is_full():
            self.flow.pause_reading()

    # -- called by the order of responses --------------------------------------------------------

    def start_waiting(self, reply: Reply) -> None:
        """Starts a request that had to wait, or the upgrade to a WebSocket."""
        if reply.request is not None:
            request, reply.request = reply.request, None
            self.bodies.release(reply)
            if self.slot.admits(request, reply):
                self.dispatch.handle(request, reply)
        elif self._hand_over is not None and self.slot.admits(self._hand_over.request, reply):
            reply.when_first(self._hand_over.run)

    def write_reply(self, reply: Reply) -> None:
        if reply.data is not None and not self._is_closed:
            self.transport.write(reply.data)
            if not reply.keep_alive:
                self.finish()

    def order_advanced(self) -> None:
        """Reads again when there is room for more requests; closes when none can come."""
        if self._is_closed:
            return
        if self.is_half_closed and not self.order:
            self.finish()
        elif not self._is_full() and not self.flow.write_paused:
            self.flow.resume_reading()

    def _is_full(self) -> bool:
        return (
            len(self.order) > MAX_PIPELINED
            or self.bodies.waiting_bytes > MAX_WAITING_BYTES
            or self._hand_over is not None
        )

    # -- streams ---------------------------------------------------------------------------------

    def write_chunk(self, body: bytes | memoryview) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(body), body) if self.is_chunked else body)

    def end_stream(self) -> None:
        """Completes the response; the client may use the connection again."""
        if not self._is_closed:
            self.stream = None
            self.touched = time.monotonic()
            if self.is_chunked:
                self.transport.write(b"0\r\n\r\n")
            self.order.stream_ended()

    def close_with_stream(self) -> None:
        """Closes the connection in the middle of a stream."""
        self._is_discarding = True
        self._close_source()
        self.transport.close()

    def _close_source(self) -> None:
        """Stops deliveries: a closing transport would drop them, and they would count as sent."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.disconnected()

    def break_stream(self) -> None:
        """Cuts the response off, so that the client sees that it is not complete."""
        self.stream = None
        self.transport.abort()

    # -- refusal, upgrade and end ----------------------------------------------------------------

    def refuse(self, error: PenstockError) -> None:
        """Answers an error after the responses before it, then closes. Discards all further
        input."""
        if self._is_discarding:
            return
        self._is_discarding = True
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
        self.order.advance()

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        if self._discarded_bytes > LINGER_BYTES:
            self.close_with_stream()

    def finish(self) -> None:
        """Closes the connection when the transport has written what it holds."""
        is_refused, self._is_discarding, self._is_closed = self._is_discarding, True, True
        self._close_source()
        self.bodies.drop()
        self.order.clear()
        if is_refused and self.transport.can_write_eof():
            # Closing on unread bytes would reset the connection, and the answer with it. TLS reads
            # them until the client has ended its side.
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.flow.close_when_written)
        else:
            self.flow.close_when_written()

    def _is_socket_granted(self, rest: memoryview) -> bool:
        """Gives the connection and `rest` to a WebSocket, after the responses before it, if the
        request asks for one and is admitted."""
        path = origin_form(self._url).partition(b"?")[0]
        if not upgrade.is_socket_wanted(self.parser.get_method(), path, self._headers):
            return False
        verdict = self.admissions.judge(self._headers, self.parser.get_http_version())
        if not self.admissions.is_welcome:
            return False
        request_id = self.dispatch.request_id_of(verdict)
        reply = self._reply = Reply(self, request_id, keep_alive=True)
        reply.path = path
        try:
            self._hand_over = upgrade.plan(self, reply, self._headers, verdict, bytes(rest))
        except PenstockError as error:
            self.refuse(error)
            return True
        self._reply = None
        self.is_receiving = False
        self.flow.pause_reading()
        self.order.add_waiting(reply)
        self.order.advance()
        return True

    def retire(self) -> None:
        """Gives the transport up: it is another protocol's from now on."""
        self._is_closed = self._is_discarding = True
        self.order.clear()
        self.order.answers.close()
        self.connections.discard(self)
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """Answers what is under way, then closes. Discards all further input."""
        self._is_discarding = True
        if self.order:
            self.order.end_after_last()
        else:
            self.transport.close()

    # -- called by the transport -----------------------------------------------------------------

    def pause_writing(self) -> None:
        self.flow.write_paused = True
        self.flow.pause_reading()
        self.order.answers.filled()
        if self.stream is not None:
            self.stream.pause()

    def resume_writing(self) -> None:
        self.flow.write_paused = False
        self.order.writing_resumed()
        if self.stream is not None:
            self.stream.resume()
        self.order.advance()
