"""Changing tokens while the broker runs: SIGHUP reads the token files again.

Invariant: a token that was replaced is worth nothing. Requests with it are refused, and connections
that used it are closed, streams and WebSockets included. A file that cannot be read changes
nothing. Must not know how a request is checked.
"""

from __future__ import annotations

import logging

from penstock.model.errors import InvalidArgument
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.expulsion import Connections, CredentialWatch, close_connection
from penstock.server.logs import hide_secret
from penstock.server.settings import Settings, read_control_plane_token, read_token

_log = logging.getLogger("penstock.server")


class TokenRotation:
    """`connections` are those that are open now. `watch` knows their credentials, where access is
    controlled."""

    def __init__(
        self,
        settings: Settings,
        dispatch: RequestDispatch,
        connections: Connections,
        watch: CredentialWatch | None = None,
    ) -> None:
        self.watch = watch
        self._settings = settings
        self._dispatch = dispatch
        self._connections = connections

    def read_again(self) -> None:
        """Reads the token files again. Called on SIGHUP; never ends the broker."""
        settings = self._settings
        if not settings.token_file and not settings.control_plane_token_file:
            _log.info("SIGHUP received: there is no token file to read again")
            return
        try:
            token, outgoing = read_token(settings), read_control_plane_token(settings)
        except InvalidArgument as error:
            _log.error("SIGHUP received: the tokens stay as they were: %s", error.message)
            return
        hide_secret(token)
        hide_secret(outgoing)
        if self._dispatch.follower is not None:
            self._dispatch.follower.use_token(outgoing)
        if settings.token_file and self._dispatch.admission.use_token(token):
            self._close_connections()
            _log.info("SIGHUP received: the token has changed; connections are closed")
        else:
            _log.info("SIGHUP received: the token files were read again")

    def _close_connections(self) -> None:
        """Closes the connections that used the old token. Without access control that may be every
        connection."""
        if self.watch is not None:
            self.watch.changed()
            return
        self._dispatch.forget_verdicts()
        for connection in list(self._connections):
            close_connection(connection, "the token has changed")
