"""One forwarded request, from its arrival to the last byte of its answer.

Invariant: the client gets exactly one answer. Once a byte of the request may have left, the request
is written again only if it is safe, that is GET or HEAD, and nothing of an answer was passed on.
Must not know how connections to owners are made or shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.model.errors import OutcomeUnknown, PenstockError
from penstock.model.limits import KIB
from penstock.server.forwarding.answer_heads import OwnerAnswerHead
from penstock.server.forwarding.answer_stream import AnswerStream, format_of
from penstock.server.http.requests import Request

if TYPE_CHECKING:
    from penstock.server.forwarding.forwarder import Forwarder
    from penstock.server.forwarding.pool import UpstreamPool
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.response_order import Reply

SMALL_ANSWER_BYTES = 64 * KIB
"""A longer answer is passed on piece by piece."""

SMALL_REQUEST_BYTES = 16 * KIB

QUICK_PATHS = frozenset({b"/v1/produce", b"/v1/ack", b"/v1/nack", b"/v1/release", b"/v1/extend"})
"""Requests that are answered with the commit that follows them. They may share a connection, since
none of them holds up the others behind it."""

SAFE_METHODS = frozenset({b"GET", b"HEAD"})
MAX_TRIES = 3
"""How often a safe request is sent, if its connection breaks each time."""


class Upstream(Protocol):
    """The connection that a request was given to."""

    is_shared: bool

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def half_close(self) -> bool:
        """Tells the owner that nothing more comes. Returns False if this connection cannot."""
        ...

    def has_ended(self) -> bool:
        """Returns whether the owner has ended it, also while it is not read."""
        ...

    def has_unsent_bytes(self) -> bool: ...

    def is_open(self) -> bool: ...

    def add(self, exchange: Exchange) -> None: ...


class Exchange:
    """`until` is the time until which an owner may be looked for. `is_dropped`: the client is gone.
    `upstream` is where the request was given to, if it was. `is_sent`: a byte of it may have
    left."""

    __slots__ = (
        "_collected",
        "_forwarder",
        "_head",
        "_stream",
        "_tries",
        "held_bytes",
        "is_dropped",
        "is_over",
        "is_quick",
        "is_safe",
        "is_sent",
        "next",
        "reply",
        "request",
        "sent_at",
        "until",
        "upstream",
    )

    def __init__(self, forwarder: Forwarder, request: Request, reply: Reply, until: float) -> None:
        self._forwarder = forwarder
        self.request = request
        self.reply = reply
        self.until = until
        self.held_bytes = len(request.body)
        self.is_safe = request.method in SAFE_METHODS
        self.is_quick = request.path in QUICK_PATHS and self.held_bytes <= SMALL_REQUEST_BYTES
        self.is_sent = self.is_dropped = self.is_over = False
        self.sent_at = 0.0
        self.upstream: Upstream | None = None
        self.next: Exchange | None = None
        """The next request of the same client's connection, if it waits for this one."""
        self._tries = 0
        self._head: OwnerAnswerHead | None = None
        self._collected: list[bytes] = []
        self._stream: AnswerStream | None = None

    def head_for(self, owner_head: bytes) -> bytes:
        """Returns the request as it is written to an owner, without its body."""
        request = self.request
        query = request.query
        target = b"%b?%b" % (request.path, query) if query else request.path
        if not request.body and self.is_safe:
            return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (
                request.method, target, owner_head, request.notes.forwarded_head,
            )  # fmt: skip
        return b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
            request.method, target, owner_head, request.notes.forwarded_head, len(request.body),
        )  # fmt: skip

    def send_by(self, pool: UpstreamPool) -> None:
        pool.send(self)

    def follow(self, before: Exchange) -> bool:
        """Sends the request behind the one before it, if both may share a connection. Returns False
        if it has to wait."""
        upstream = before.upstream
        if upstream is None or not (upstream.is_shared and upstream.is_open() and self.is_quick):
            return False
        upstream.add(self)
        return True

    def hand_back(self, dispatch: RequestDispatch) -> None:
        """Lets this broker handle the request itself."""
        dispatch.handle(self.request, self.reply)

    # -- called by the upstream connection -------------------------------------------------------

    def sending(self, upstream: Upstream, now: float) -> None:
        """The next bytes that are written are those of this request."""
        self.upstream = upstream
        self.is_sent = True
        self.sent_at = now
        self._tries += 1

    def answered(self, head: bytes, body: bytes) -> None:
        """The whole answer has come: `head` are its status line and headers, as they go on."""
        if self._finish():
            self.reply.send_forwarded(head, body)

    def begin(self, head: OwnerAnswerHead) -> None:
        """The head of the answer has come."""
        is_small = head.length is not None and head.length <= SMALL_ANSWER_BYTES
        if self.is_dropped:
            if not is_small and self.upstream is not None:
                self.upstream.abort()
            return
        self._head = head
        if is_small:
            return
        form = format_of(self.request.path, head)
        self._stream = AnswerStream(self, self.reply, head, form)
        if self.upstream is not None:
            self.upstream.pause_reading()
        self.reply.when_first(self._stream.start)

    def add_body(self, part: bytes) -> None:
        if self._stream is not None:
            self._stream.add(part)
        elif not self.is_dropped:
            self._collected.append(part)

    def end(self) -> None:
        """The answer is complete."""
        head, stream = self._head, self._stream
        if stream is not None:
            self._finish()
            stream.complete()
        elif head is not None and head.is_misdirected and not self.is_dropped:
            self._head, self._collected = None, []
            self.is_sent, self.upstream = False, None
            self._forwarder.not_sent(self, "it is the owner no longer")
        elif self._finish() and head is not None:
            self.reply.send_forwarded(head.lines_with_length(), b"".join(self._collected))

    def broken(self, reason: str) -> None:
        """The connection is gone, before the answer was complete."""
        self.upstream = None
        if self.is_over or self.is_dropped:
            self._finish()
        elif self._stream is not None and self._stream.is_started:
            self._finish()
            self._stream.broken(reason)
        elif not self.is_sent:
            self._forwarder.not_sent(self, reason)
        elif self.is_safe and self._stream is None and self._tries < MAX_TRIES:
            self._head, self._collected = None, []
            self._forwarder.try_again(self, reason)
        else:
            self.refuse(self._forwarder.outcome_unknown(self.request, reason))

    # -- called by the forwarder -----------------------------------------------------------------

    def refuse(self, error: PenstockError) -> None:
        if self._finish():
            if self._stream is not None:
                self._stream.close()
            self.reply.send_error(error)

    def drop(self) -> None:
        """The client is gone. A change that may be under way is let finish, so that leaving early
        means what it does at the owner; all else ends at the owner at once."""
        upstream = self.upstream
        if self.is_over:
            return
        self.is_dropped = True
        self._finish()
        if upstream is None or upstream.is_shared:
            return
        if self.is_safe or self._head is not None or upstream.has_unsent_bytes():
            upstream.abort()

    def end_stream(self, reason: str) -> None:
        """Ends an endless answer, because this broker stops."""
        stream, upstream = self._stream, self.upstream
        if stream is None or not stream.form.is_endless:
            return
        if not stream.is_started:
            self.refuse(OutcomeUnknown(reason))
        elif self._finish():
            stream.broken(reason)
        if upstream is not None:
            upstream.abort()

    def _finish(self) -> bool:
        """Ends the exchange. Returns False if that was done before, or nobody wants an answer."""
        if self.is_over:
            return False
        self.is_over = True
        self._forwarder.finished(self)
        return not self.is_dropped
