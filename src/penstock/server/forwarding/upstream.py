"""One connection to an owner: writes requests, and reads their answers in the same order.

Invariants: a request is written whole, in one piece, behind those before it. What is no answer of a
broker ends the connection, and with it every request on it whose answer has not come. Must not know
which owner this is, nor what becomes of the requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import httptools

from penstock.model.limits import KIB
from penstock.server.forwarding.answer_heads import PLAIN, BadAnswer, Headers, read_head
from penstock.server.forwarding.exchange import Exchange
from penstock.server.http.tcp_liveness import has_ended

if TYPE_CHECKING:
    from penstock.server.forwarding.pool import UpstreamPool

MAX_HEAD_BYTES = 64 * KIB
"""A head of an answer is far smaller. The parser holds it until it is whole."""

HIGH_WATER_BYTES = 64 * KIB

Upgraded = Callable[["UpstreamConnection", bytes, bytes], None]
"""Is given the connection, the head of the answer, and the bytes after it."""


class UpstreamConnection(asyncio.Protocol):
    """`is_shared`: several requests are under way on it at once. `exchanges` are they, in order.
    `upgraded` takes the connection over if the owner switches protocols."""

    def __init__(self, pool: UpstreamPool, *, is_shared: bool) -> None:
        self._pool = pool
        self.is_shared = is_shared
        self.exchanges: deque[Exchange] = deque()
        self.upgraded: Upgraded | None = None
        self.transport: asyncio.Transport | None = None
        self.is_usable = True
        self.is_write_paused = False
        self.idle_since = 0.0
        self._is_read_paused = False
        self._reason = "the connection to the owner broke"
        self._parser = httptools.HttpResponseParser(self)
        # Of the answer that is being read by the parser.
        self._is_in_answer = self._is_in_head = False
        self._headers: Headers = []
        self._head_bytes = 0
        self._switches = False

    # -- called by the pool ----------------------------------------------------------------------

    def add(self, exchange: Exchange) -> None:
        """Sends the request, at once or when the connection is made."""
        self.exchanges.append(exchange)
        exchange.upstream = self
        if self.transport is not None:
            self._write(exchange)

    def is_open(self) -> bool:
        """Returns whether a request may be given to it."""
        return self.is_usable and (self.transport is None or not self.transport.is_closing())

    def retire(self) -> None:
        """Takes no further request. Closes when the answers under way have come."""
        self.is_usable = False
        if not self.exchanges and self.transport is not None:
            self.transport.close()

    def failed(self, reason: str) -> None:
        """The connection could not be made, so nothing was sent."""
        self.is_usable = False
        self._break(reason)

    def _write(self, exchange: Exchange) -> None:
        if self.transport is None:
            raise RuntimeError("there is no connection yet")
        exchange.sending(self, self._pool.loop.time())
        head = exchange.head_for(self._pool.owner_head)
        body = exchange.request.body
        if len(body) <= HIGH_WATER_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    # -- called by exchanges ---------------------------------------------------------------------

    def abort(self) -> None:
        self.is_usable = False
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        if not self._is_read_paused and self.transport is not None:
            self._is_read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_read_paused and self.transport is not None:
            self._is_read_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def has_ended(self) -> bool:
        return self.transport is not None and has_ended(self.transport)

    def half_close(self) -> bool:
        self.is_usable = False
        if self.transport is None or not self.transport.can_write_eof():
            return False
        self.transport.write_eof()
        return True

    def has_unsent_bytes(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    # -- called by the transport -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self.transport is None:
            raise RuntimeError("a connection was made without a transport")
        self.transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self.exchanges = deque(each for each in self.exchanges if not each.is_over)
        for exchange in self.exchanges:
            self._write(exchange)
        if not self.exchanges:
            self._pool.freed(self)

    def data_received(self, data: bytes) -> None:
        try:
            at = 0 if self._is_in_answer else self._take_plain(data)
            if at < len(data):
                self._parse(data[at:] if at else data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(str(cause) if isinstance(cause, BadAnswer) else "its answer is not valid")
        except httptools.HttpParserError as error:
            self._refuse(f"its answer is not HTTP: {error}")
        except BadAnswer as error:
            self._refuse(str(error))

    def eof_received(self) -> None:
        self.is_usable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._pool.lost(self)
        self._break(self._reason)

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False

    def _break(self, reason: str) -> None:
        exchanges, self.exchanges = self.exchanges, deque()
        for exchange in exchanges:
            exchange.broken(reason)

    def _refuse(self, reason: str) -> None:
        self._reason = f"the owner cannot be understood: {reason}"
        self.abort()

    # -- answers ---------------------------------------------------------------------------------

    def _take_plain(self, data: bytes) -> int:
        """Takes answers that need no parser; returns where the last of them ends."""
        at = 0
        exchanges = self.exchanges
        while exchanges and not self._switches:
            found = PLAIN.match(data, at)
            if found is None or exchanges[0].request.method == b"HEAD":
                break
            length, begin = found[2], found.end()
            if length is None:
                if found[1] != b"204":
                    break
                end = begin
            else:
                end = begin + int(length)
                if end > len(data) or found[1] == b"204":
                    break
            exchange = exchanges.popleft()
            exchange.answered(data[at : begin - 2], data[begin:end])
            at = end
            if not exchanges:
                self._pool.freed(self)
        return at

    def _parse(self, data: bytes) -> None:
        if not self.exchanges and not self._is_in_answer:
            raise BadAnswer("it answers what nobody asked")
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise BadAnswer("the head of its answer is too long")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._switch(data[stop.args[0] :])

    def on_message_begin(self) -> None:
        if not self.exchanges:
            raise BadAnswer("it answers what nobody asked")
        self._is_in_answer = self._is_in_head = True
        self._headers = []
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        status = self._parser.get_status_code()
        if status == 101:
            if self.upgraded is None:
                raise BadAnswer("it switches protocols")
            self._switches = True
            return
        if status < 200:
            return
        exchange = self.exchanges[0]
        is_bodyless = exchange.request.method == b"HEAD"
        closes = not self._parser.should_keep_alive()
        exchange.begin(read_head(status, self._headers, is_bodyless=is_bodyless, closes=closes))
        if closes:
            self.is_usable = False
        if is_bodyless:
            # The parser would wait for the body that the head describes.
            self._parser = httptools.HttpResponseParser(self)
            self._complete()

    def on_body(self, body: bytes) -> None:
        if not self.exchanges:
            raise BadAnswer("an answer to HEAD has a body")
        self.exchanges[0].add_body(body)

    def on_message_complete(self) -> None:
        if self._switches or self._parser.get_status_code() < 200:
            self._is_in_answer = False
            return
        if self.exchanges:
            self._complete()

    def _complete(self) -> None:
        self._is_in_answer = False
        exchange = self.exchanges.popleft()
        exchange.end()
        if not self.exchanges:
            self._pool.freed(self)

    def _switch(self, rest: bytes) -> None:
        """Gives the connection to the tunnel of a WebSocket."""
        upgraded = self.upgraded
        if not self._switches or upgraded is None:
            raise BadAnswer("it switches protocols")
        head = b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n" % b"".join(
            [b"%b: %b\r\n" % header for header in self._headers]
        )
        self.is_usable = False
        self._pool.lost(self)
        upgraded(self, head, rest)
