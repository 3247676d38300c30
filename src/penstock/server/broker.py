"""A broker as its clients see it: it listens, and serves or forwards requests.

It lives from the start of the process to its end. An engine comes and goes: `begin` and `end`. In a
cluster it forwards what it does not serve; an embedded broker begins before it listens and never
forwards. Must not know which engine it is, nor how owners are chosen.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from functools import partial

from penstock.api.cluster import OwnerMap
from penstock.api.engine import Engine
from penstock.server.forwarding.forwarder import Forwarder
from penstock.server.forwarding.standby_access import StandbyAuthenticator
from penstock.server.forwarding.tls import upstream_tls
from penstock.server.http.admission import Admission, is_loopback
from penstock.server.http.answer_budget import AnswerBudget
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.expulsion import CredentialWatch
from penstock.server.identity.jwt_settings import Jwt, start_jwt
from penstock.server.listening import BrokerServer, address_of, listen
from penstock.server.pages import WebPages
from penstock.server.rotation import TokenRotation
from penstock.server.routes.table import ROUTES, path_route
from penstock.server.serving import Serving
from penstock.server.settings import Settings
from penstock.server.tls import TlsFiles, open_tls


class Broker:
    """`serving` is None while the broker has no engine. `give_back` returns memory that the
    allocator keeps to the system."""

    def __init__(
        self,
        settings: Settings,
        token: str,
        listener: socket.socket,
        tls: TlsFiles | None,
        jwt: Jwt | None,
        owners: OwnerMap | None,
        give_back: Callable[[], object],
    ) -> None:
        self.address = address_of(settings, listener)
        self.serving: Serving | None = None
        self._settings = settings
        self._listener = listener
        self._jwt = jwt
        self._loop = asyncio.get_running_loop()
        self.dispatch = RequestDispatch(
            settings.limits(),
            Admission(
                loopback_only=is_loopback(settings.host),
                token=token,
                allowed_origins=settings.allowed_origins,
                is_forwarding=owners is not None,
            ),
            ROUTES | WebPages(self.address).routes(),
            path_route,
            request_timeout_ms=settings.request_timeout_ms,
            idle_timeout_ms=settings.idle_timeout_ms,
            ws_ping_ms=settings.ws_ping_ms,
            answers=AnswerBudget(
                settings.answer_memory_bytes,
                settings.stalled_timeout_ms,
                give_back=partial(self._loop.run_in_executor, None, give_back),
            ),
        )
        self.server = BrokerServer(self.dispatch, tls)
        self._rotation = TokenRotation(settings, self.dispatch, self.server.connections)
        if owners is not None:
            self.dispatch.forwarder = Forwarder(
                self.dispatch,
                owners,
                wait_ms=settings.forward_wait_ms,
                tls=partial(upstream_tls, settings),
            )
            self._use_standby_access()
        if jwt is not None:
            jwt[0].follow_keys(self._keys_changed)
            self.server.sweeps.append(jwt[1].tick)

    async def begin(self, engine: Engine, *, makes_first_token: bool = False) -> str:
        """Serves from the engine from now on. Returns the first admin token, if it was to be made
        and there was no other way in."""
        serving = Serving(engine, self._settings, self.dispatch, self.server, self._jwt)
        first_token = await serving.make_first_token() if makes_first_token else ""
        self.serving = serving
        self._rotation.watch = serving.watch
        await serving.begin()
        if self.dispatch.forwarder is not None:
            self.dispatch.forwarder.owner_changed()
        return first_token

    async def end(self, reason: str) -> None:
        """Serves no longer: the engine gets no further request, and what it feeds ends with the
        reason. Then close the engine, and call `refuse_unanswered`."""
        serving, self.serving = self.serving, None
        if serving is None:
            return
        self._rotation.watch = None
        serving.end(reason)
        if self.dispatch.forwarder is not None:
            self._use_standby_access()
        await serving.stop_following()

    def refuse_unanswered(self, reason: str) -> None:
        """Answers requests that the engine held when it was closed: their outcome is unknown."""
        self.server.refuse_unanswered(reason)

    async def run(self, started: Callable[[], None]) -> None:
        """Accepts connections until a signal, or `server.stop`, ends the broker."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.server.stop)
        self._loop.add_signal_handler(signal.SIGHUP, self._read_again)
        try:
            await self.server.run(self._listener, started)
        finally:
            if self.dispatch.forwarder is not None:
                self.dispatch.forwarder.close()

    def _use_standby_access(self) -> None:
        """Lets the owner find out who sends a request: without an engine there are no tokens."""
        forwarder, admission = self.dispatch.forwarder, self.dispatch.admission
        if forwarder is not None and self._settings.access_control:
            authenticator = StandbyAuthenticator(admission.token, forwarder.owner_text)
            admission.use_authenticator(authenticator)
            connections = self.server.connections
            self._rotation.watch = CredentialWatch(self.dispatch, connections, authenticator)

    def _read_again(self) -> None:
        self._rotation.read_again()
        self.server.reload_tls(is_asked=True)
        if self._jwt is not None:
            self._jwt[1].read_again()

    def _keys_changed(self) -> None:
        if self.serving is not None and self.serving.watch is not None:
            self.serving.watch.changed()


async def open_broker(
    settings: Settings,
    token: str,
    owners: OwnerMap | None = None,
    *,
    give_back: Callable[[], object],
    listener: socket.socket | None = None,
) -> Broker:
    """Reads the files of TLS and keys, and takes the port, unless the caller has taken it. Nothing
    is accepted yet."""
    tls = open_tls(settings)
    jwt = await start_jwt(settings)
    return Broker(settings, token, listener or listen(settings), tls, jwt, owners, give_back)
