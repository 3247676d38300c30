"""The part of a broker that exists only while it serves: its engine and what listens to it.

An embedded broker serves from its start to its end. A broker of a cluster begins when it becomes
the owner, and ends when it is the owner no longer; its connections stay open. Invariant: after
`end`, no request reaches the engine, and no stream or socket is open that it feeds. The caller
opens the engine and closes it. Must not know which engine it is.
"""

from __future__ import annotations

from penstock.api.engine import Engine
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.authenticator import Authenticator
from penstock.server.identity.expulsion import CredentialWatch
from penstock.server.identity.first_token import make_first_token
from penstock.server.identity.jwt_settings import Jwt
from penstock.server.listening import BrokerServer
from penstock.server.registry.control_plane import Follower
from penstock.server.settings import Settings, read_control_plane_token
from penstock.server.websocket.connection import WebSocketConnection


class Serving:
    """`watch` closes the connections of credentials that end; None without access control."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        dispatch: RequestDispatch,
        server: BrokerServer,
        jwt: Jwt | None,
    ) -> None:
        self.engine = engine
        self.watch: CredentialWatch | None = None
        self._settings = settings
        self._dispatch = dispatch
        self._server = server
        self._authenticator: Authenticator | None = None
        if settings.access_control:
            verifier, token = None if jwt is None else jwt[0], dispatch.admission.token
            self._authenticator = Authenticator(engine.tokens, static_token=token, jwt=verifier)
            self.watch = CredentialWatch(dispatch, server.connections, self._authenticator)

    async def make_first_token(self) -> str:
        """Creates a token for an admin, if there is no other way in, and returns it."""
        if self._authenticator is None or self._dispatch.admission.needs_token:
            return ""
        return await make_first_token(self.engine.tokens, self.engine.audit)

    async def begin(self) -> None:
        """Lets requests reach the engine, and the registry follow the control plane, if there is
        one."""
        if self._authenticator is not None and self.watch is not None:
            self._dispatch.admission.use_authenticator(self._authenticator)
            self.engine.tokens.listen(self.watch.changed)
            self._server.sweeps.append(self.watch.sweep)
        self._dispatch.serve(self.engine)
        if self._settings.control_plane:
            self._dispatch.follower = Follower(
                self.engine.registry,
                self._dispatch.instance,
                self._settings.control_plane,
                token=read_control_plane_token(self._settings),
                sync_ms=self._settings.registry_sync_ms,
            )
            await self._dispatch.follower.start()

    async def stop_following(self) -> None:
        """Ends the part of `begin` that takes time."""
        follower, self._dispatch.follower = self._dispatch.follower, None
        if follower is not None:
            await follower.close()

    def end(self, reason: str) -> None:
        """Lets no further request reach the engine, and ends streams and sockets with the reason.
        Requests that the engine holds are answered by it, or refused when it is closed."""
        self._dispatch.stop_serving()
        if self.watch is not None:
            self._server.sweeps.remove(self.watch.sweep)
        self.engine.end_streams(reason)
        for connection in list(self._server.connections):
            if isinstance(connection, WebSocketConnection):
                connection.shutdown(reason)
