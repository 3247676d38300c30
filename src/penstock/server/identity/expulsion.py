"""Closes connections whose credential no longer holds: expired, revoked, or replaced.

Invariant: from the moment of a change no request is admitted by an earlier verdict, and within a
turn of the loop no connection is left that used the credential; within a second, if it expired.
Deliveries stop before a connection closes, so that nothing counts as sent that was dropped. Must
not know how credentials are checked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from typing import Protocol

from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.credentials import Credential
from penstock.server.websocket.connection import WebSocketConnection

Connections = Collection[HttpConnection | WebSocketConnection]

_log = logging.getLogger("penstock.server")


class KnowsCredentials(Protocol):
    def holds(self, credential: Credential) -> bool:
        """Returns whether a credential that was valid still is."""
        ...


class CredentialWatch:
    """`connections` are those that are open now."""

    def __init__(
        self, dispatch: RequestDispatch, connections: Connections, authenticator: KnowsCredentials
    ) -> None:
        self._dispatch = dispatch
        self._connections = connections
        self._authenticator = authenticator
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def changed(self) -> None:
        """Called when something that credentials depend on has changed. Connections are closed in
        the next turn: this may be called while the engine decides, which must not be re-entered."""
        self._dispatch.forget_verdicts()
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.sweep)

    def sweep(self) -> None:
        self._is_scheduled = False
        holds = self._authenticator.holds
        closed = 0
        for connection in list(self._connections):
            if not all(map(holds, _credentials_of(connection))):
                close_connection(connection, "the credential is no longer valid")
                closed += 1
        if closed:
            _log.info("closed %d connections whose credential is no longer valid", closed)


def _credentials_of(connection: HttpConnection | WebSocketConnection) -> Iterator[Credential]:
    """Returns the credentials of the requests under way, and of the last one that was read."""
    if not isinstance(connection, HttpConnection):
        found = [connection.credential]
    else:
        found = [connection.admissions.verdict.notes.credential]
        for reply in connection.order:
            request = reply.request
            found.append(reply.credential if request is None else request.notes.credential)
    return (credential for credential in found if credential is not None)


def close_connection(connection: HttpConnection | WebSocketConnection, reason: str) -> None:
    """Closes a connection after the answers that are under way. Requests that have not started are
    dropped, and so are streams, begun or not."""
    if not isinstance(connection, HttpConnection):
        connection.shutdown(reason)
        return
    connection.order.drop_waiting()
    if connection.stream is not None:
        connection.close_with_stream()
    elif connection.order.blocker is not None:
        connection.finish()
    else:
        connection.shutdown()
