"""A forwarded request for a WebSocket: answered by the owner, and then a tunnel.

Invariant: the client's connection is given up only when the owner has switched protocols. Until
then it is an HTTP connection that waits for an answer and reads nothing. After any other answer it
closes, since it is not clear what its next bytes mean. Must not know frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.errors import PenstockError
from penstock.server.forwarding.answer_heads import OwnerAnswerHead
from penstock.server.forwarding.exchange import Exchange
from penstock.server.forwarding.tunnel import open_tunnel
from penstock.server.websocket.upgrade import PATH

if TYPE_CHECKING:
    from penstock.server.forwarding.forwarder import Forwarder
    from penstock.server.forwarding.pool import UpstreamPool
    from penstock.server.forwarding.upstream import UpstreamConnection
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.websocket.upgrade import HandOver

_UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n"


class ForwardedSocket(Exchange):
    def __init__(self, forwarder: Forwarder, hand_over: HandOver, until: float) -> None:
        super().__init__(forwarder, hand_over.request, hand_over.reply, until)
        # Sent twice, it might be two sockets for a moment; the client can ask again.
        self.is_safe = False
        self._hand_over = hand_over

    def head_for(self, owner_head: bytes) -> bytes:
        return b"GET %b HTTP/1.1\r\n%b%b%b\r\n" % (
            PATH, owner_head, self.request.notes.forwarded_head, _UPGRADE,
        )  # fmt: skip

    def send_by(self, pool: UpstreamPool) -> None:
        pool.send_alone(self).upgraded = self._upgraded

    def hand_back(self, dispatch: RequestDispatch) -> None:
        self._hand_over.grant()

    def _upgraded(self, upstream: UpstreamConnection, head: bytes, rest: bytes) -> None:
        upstream.exchanges.clear()
        if not self._finish():
            upstream.abort()
            return
        open_tunnel(self._hand_over, upstream, head, rest)

    # -- any other answer closes -----------------------------------------------------------------

    def answered(self, head: bytes, body: bytes) -> None:
        self._close_after()
        super().answered(head, body)

    def begin(self, head: OwnerAnswerHead) -> None:
        if not head.is_misdirected:
            self._close_after()
        super().begin(head)

    def refuse(self, error: PenstockError) -> None:
        self._close_after()
        super().refuse(error)

    def drop(self) -> None:
        upstream = self.upstream
        super().drop()
        if upstream is not None:
            upstream.abort()

    def _close_after(self) -> None:
        if not self.is_over:
            self._hand_over.connection.shutdown()
            self._hand_over.connection.flow.resume_reading()
