"""The tenant and namespace that an open connection counts for, against the quota `connections`.

Invariant: a connection counts once, for the sender of its latest request, from the moment that this
request may start until the connection ends, in whatever way. Senders that name no tenant, and those
whose credential was refused, count for nobody. A connection that is one too many handles no further
request. It counts at the engine that serves now; without one it counts nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.model.errors import ResourceExhausted
from penstock.model.scopes import Scope

if TYPE_CHECKING:
    from penstock.api.quotas import QuotasPart
    from penstock.server.http.dispatch import RequestDispatch
    from penstock.server.http.requests import Request
    from penstock.server.http.response_order import Reply

_REFUSED: Scope = ("", "")
"""The sender of a connection that was refused. It is no request's, so every further one comes to
`admits`."""


class ConnectionSlot:
    """`sender` is whom the connection counts for, or None. A connection that compares it with that
    of a request needs to ask `admits` only if it is another object. `_quotas` are those that count
    it, None while none do."""

    __slots__ = ("_dispatch", "_quotas", "sender")

    def __init__(self, dispatch: RequestDispatch) -> None:
        self._dispatch = dispatch
        self._quotas: QuotasPart | None = None
        self.sender: Scope | None = None

    def admits(self, request: Request, reply: Reply) -> bool:
        """Counts the connection for the sender of a request that is to start. If it is one too
        many, answers with the refusal, and the connection closes after that."""
        if self.sender is _REFUSED:
            return False
        try:
            self._move(request.notes.sender)
        except ResourceExhausted as refusal:
            self.sender = _REFUSED
            reply.path = request.path
            reply.send_last_error(refusal)
            return False
        return True

    def _move(self, sender: Scope | None) -> None:
        dispatch = self._dispatch
        quotas = dispatch.engine.quotas if dispatch.is_serving else None
        if sender == self.sender and quotas is self._quotas:
            self.sender = sender
            return
        # Its own place is free first: it may move within a tenant that has no other.
        self.leave()
        if sender is not None and quotas is not None:
            quotas.connect(sender)
            self._quotas = quotas
        self.sender = sender

    def leave(self) -> None:
        """Frees the place, because the connection has ended."""
        quotas, self._quotas = self._quotas, None
        sender, self.sender = self.sender, None
        if quotas is not None and sender is not None and sender is not _REFUSED:
            quotas.disconnect(sender)
