"""A long or endless answer on its way from the owner to a client.

The owner's connection is read only while the client's accepts bytes, so a window of two buffers is
all that is held. Invariants: lines go out as they come. An answer that is cut short never looks
complete to its reader, unless it is one of lines or events that may end after any of them. Must not
know how the answer came.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock.model.errors import Unavailable
from penstock.server.forwarding.answer_heads import OwnerAnswerHead
from penstock.server.http.feeds import END_GRACE_S
from penstock.server.http.responses import encode_json, typed_error
from penstock.server.http.tcp_liveness import give_up_when_unreachable, probe_when_idle, reset

if TYPE_CHECKING:
    from penstock.server.forwarding.exchange import Exchange
    from penstock.server.http.connection import HttpConnection
    from penstock.server.http.response_order import Reply

CONSUME_PATH = b"/v1/consume"
FEED_ENDS = (b"/subscribe", b"/watch")
"""The paths of answers that go on until one side ends them."""


class AnswerForm(msgspec.Struct, frozen=True):
    """`ending` are the last bytes of each line or event. `tells_reason`: the last line may be an
    error."""

    is_endless: bool = False
    ending: bytes = b""
    tells_reason: bool = False
    is_sse: bool = False

    def reason(self, text: str) -> bytes:
        """Returns the line or event that says why the stream has ended."""
        body = encode_json(typed_error(Unavailable(text)))
        return b"event: error\ndata: %b\n\n" % body if self.is_sse else body + b"\n"


_WHOLE = AnswerForm()
_CONSUME = AnswerForm(is_endless=True, ending=b"\n")
_LINES = AnswerForm(is_endless=True, ending=b"\n", tells_reason=True)
_EVENTS = AnswerForm(is_endless=True, ending=b"\n\n", tells_reason=True, is_sse=True)


def format_of(path: bytes, head: OwnerAnswerHead) -> AnswerForm:
    if head.length is not None:
        return _WHOLE
    if path == CONSUME_PATH:
        return _CONSUME
    if not path.endswith(FEED_ENDS):
        return _WHOLE
    return _EVENTS if head.content_type().startswith(b"text/event-stream") else _LINES


class AnswerStream:
    """The `stream` of a client's connection. Before it is the first in the order of answers, what
    has come of it waits in `_early`."""

    def __init__(
        self, exchange: Exchange, reply: Reply, head: OwnerAnswerHead, form: AnswerForm
    ) -> None:
        self.form = form
        self.is_started = False
        self.is_answer = not form.is_endless
        self._exchange = exchange
        self._reply = reply
        self._head = head
        self._early: list[bytes] = []
        self._is_complete = False
        self._is_closed = False
        self._last = b""
        self._connection: HttpConnection | None = None
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """All answers before this one have left."""
        if self._is_closed:
            return
        self.is_started = True
        is_chunked = self._head.length is None
        if self.form.is_endless and self._head.closes:
            self._reply.keep_alive = False
        lines = self._head.lines() if is_chunked else self._head.lines_with_length()
        connection = self._connection = self._reply.open_forwarded(lines, is_chunked=is_chunked)
        connection.stream = self
        early, self._early = self._early, []
        for part in early:
            self.add(part)
        if self._is_complete:
            self._end(connection)
        elif self.form.is_endless:
            if connection.is_half_closed:
                # Nothing else would ever tell that this client is gone.
                connection.close_with_stream()
                return
            probe_when_idle(connection.transport, connection.dispatch.ws_ping_s)
            give_up_when_unreachable(connection.transport, connection.dispatch.ws_ping_s)
        if not connection.flow.write_paused:
            self.resume()

    # -- called by the exchange ------------------------------------------------------------------

    def add(self, part: bytes) -> None:
        connection = self._connection
        if connection is None:
            if not self._is_closed:
                self._early.append(part)
            return
        if self.form.is_endless:
            self._last = (self._last + part)[-2:] if len(part) < 2 else part[-2:]
        connection.write_chunk(part)

    def complete(self) -> None:
        self._is_complete = True
        if self._connection is not None:
            self._end(self._connection)

    def broken(self, reason: str) -> None:
        """Ends the stream at the client, with the reason if its format has a place for it."""
        connection, self._connection = self._connection, None
        self._is_closed = True
        if connection is None:
            return
        form = self.form
        if connection.is_half_closed and form.is_endless:
            connection.close_with_stream()
        elif form.is_endless and (not self._last or self._last.endswith(form.ending)):
            if form.tells_reason:
                connection.write_chunk(form.reason(reason))
            self._end_at(connection)
        else:
            connection.break_stream()

    def close(self) -> None:
        """Never starts."""
        self._is_closed = True
        self._early = []

    def _end(self, connection: HttpConnection) -> None:
        self._connection = None
        connection.order.answers.hold(0)
        self._end_at(connection)

    def _end_at(self, connection: HttpConnection) -> None:
        connection.end_stream()
        if self.form.is_endless and connection.flow.write_paused:
            connection.loop.call_later(END_GRACE_S, reset, connection.transport)

    def _look_again(self) -> None:
        if self._connection is not None:
            self._next_look = self._connection.loop.call_later(END_GRACE_S, self._look)

    def _look(self) -> None:
        """Ends a connection that accepts nothing, if the owner has ended the stream: the end is
        behind bytes that are not read."""
        connection, upstream = self._connection, self._exchange.upstream
        if connection is None or not connection.flow.write_paused:
            return
        if upstream is not None and upstream.has_ended():
            reset(connection.transport)
        else:
            self._look_again()

    # -- called by the connection ----------------------------------------------------------------

    def pause(self) -> None:
        if self._exchange.upstream is not None:
            self._exchange.upstream.pause_reading()
        if self.form.is_endless:
            self._look_again()

    def resume(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        if self.is_answer and self._connection is not None:
            self._connection.order.answers.hold(0)
        if self._exchange.upstream is not None:
            self._exchange.upstream.resume_reading()

    def half_closed(self) -> bool:
        """The client sends nothing more. A whole answer goes on; the owner is told to end an
        endless one, and what it has sent already still goes to the client. Returns whether the
        connection stays for that."""
        if self._connection is None:
            return False
        if self.is_answer:
            return True
        upstream = self._exchange.upstream
        return upstream is not None and upstream.half_close()

    def disconnected(self) -> None:
        """The connection is gone."""
        self._connection = None
        self._is_closed = True
        self._exchange.drop()
