"""Accepts connections until it is told to stop, then drains them.

With TLS a handshake that is slow or fails delays nobody else, and has a time limit. New TLS files
get a listener of their own on the same port, and the one before is closed: open connections are not
touched. Must not know what requests do.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

from penstock.model.errors import InvalidArgument, OutcomeUnknown
from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.settings import Settings
from penstock.server.tls import (
    HANDSHAKE_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
    RefusedCertificates,
    TlsFiles,
)
from penstock.server.websocket.connection import WebSocketConnection

STOPPING = "the broker is stopping"
DRAIN_SECONDS = 2
BROKERS_S = 1.0
"""How long a broker of a cluster that stops waits for others to close their connections to it."""
BACKLOG = 4096
GOODBYE_S = 0.1
"""Lets the system send the last bytes of connections with TLS."""

MIN_CONNECTIONS = 16
RESERVED_FILES = 128
"""Open files that connections leave to the log, to history and to the sealing process. Without
them a write would fail because of clients that only connect."""

_log = logging.getLogger("penstock.server")


class RefusedConnection(asyncio.Protocol):
    """A connection beyond what the limit of open files allows. It is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class BrokerServer:
    """`sweeps` are called once a second. `farewell` is what the broker does first when it is told
    to stop, while it still accepts connections."""

    def __init__(self, dispatch: RequestDispatch, tls: TlsFiles | None = None) -> None:
        self.connections: set[HttpConnection | WebSocketConnection] = set()
        self.sweeps: list[Callable[[], None]] = []
        self.farewell: Callable[[], Awaitable[None]] | None = None
        self._dispatch = dispatch
        self._tls = tls
        self._refused_certificates = RefusedCertificates()
        self._loop = asyncio.get_running_loop()
        self._is_stopping = asyncio.Event()
        self._next_sweep: asyncio.TimerHandle | None = None
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._is_full_logged = False

    def stop(self) -> None:
        self._is_stopping.set()

    async def stopping(self) -> None:
        """Returns when `stop` is called."""
        await self._is_stopping.wait()

    async def run(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Calls `started` when clients can connect; returns when the broker has drained."""
        self._listener = listener
        if self._tls is not None:
            self._loop.set_exception_handler(_log_unexpected)
        self._server = await self._accept(None if self._tls is None else self._tls.context)
        self._sweep()
        try:
            started()
            await self._is_stopping.wait()
            if self.farewell is not None:
                await self.farewell()
            if self._reloading is not None:
                await self._reloading
            self._server.close()
            listener.close()
            await self._drain()
        finally:
            if self._next_sweep is not None:
                self._next_sweep.cancel()

    def reload_tls(self, *, is_asked: bool = False) -> None:
        """Uses the TLS files for new connections, if they have changed or if `is_asked`."""
        if self._tls is None or self._is_stopping.is_set():
            return
        if self._reloading is None or self._reloading.done():
            context = self._tls.changed_context(is_asked=is_asked)
            if context is not None:
                self._reloading = self._loop.create_task(self._replace(context))

    async def _replace(self, context: ssl.SSLContext) -> None:
        """Accepts with the new context before the old listener is closed, so that at every moment
        somebody accepts."""
        before = self._server
        self._server = await self._accept(context)
        if before is not None:
            before.close()

    async def _accept(self, context: ssl.SSLContext | None) -> asyncio.Server:
        if self._listener is None:
            raise RuntimeError("there is no listening socket yet")
        options: dict[str, Any] = {"sock": self._listener.dup(), "backlog": BACKLOG}
        if context is not None:
            self._refused_certificates.watch(context)
            options["ssl"] = context
            options["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
            options["ssl_shutdown_timeout"] = SHUTDOWN_TIMEOUT_S
        return await self._loop.create_server(self._connect, **options)

    def _connect(self) -> asyncio.Protocol:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(MIN_CONNECTIONS, files - RESERVED_FILES)
        if self._dispatch.forwarder is not None:
            # Each may need a connection to the owner.
            most = max(MIN_CONNECTIONS, most // 2)
        if files == resource.RLIM_INFINITY or len(self.connections) < most:
            return HttpConnection(self._dispatch, self.connections)
        if not self._is_full_logged:
            self._is_full_logged = True
            _log.warning(
                "%d connections are open, as many as the limit of %d open files allows; more are "
                "closed at once. Raise the limit (ulimit -n, LimitNOFILE) if they are needed",
                len(self.connections),
                files,
            )
        return RefusedConnection()

    def _sweep(self) -> None:
        self._next_sweep = self._loop.call_later(1, self._sweep)
        self._dispatch.tick([each for each in self.connections if isinstance(each, HttpConnection)])
        if self._dispatch.forwarder is not None:
            self._dispatch.forwarder.tick()
        for sweep in self.sweeps:
            sweep()
        self.reload_tls()

    async def _drain(self) -> None:
        """Ends streams, and waits until connections have their answers and are closed."""
        self._dispatch.is_draining = True
        if self._dispatch.is_serving:
            self._dispatch.engine.end_streams(STOPPING)
        if self._dispatch.forwarder is not None:
            self._dispatch.forwarder.end_streams(STOPPING)
            await self._wait_for_brokers()
        for connection in list(self.connections):
            connection.shutdown()
        deadline = self._loop.time() + DRAIN_SECONDS
        while self._unfinished() and self._loop.time() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
        left = self._unfinished()
        if left:
            _log.warning("%d connections did not close within %d s", left, DRAIN_SECONDS)
        elif self.connections:
            await asyncio.sleep(GOODBYE_S)

    async def _wait_for_brokers(self) -> None:
        """Waits until other brokers have closed the connections over which they forwarded. Each has
        heard of the hand-over or will soon, and what it still sends is refused as not executed. A
        connection that is closed here would leave it in doubt."""
        deadline = self._loop.time() + BROKERS_S
        while self._loop.time() < deadline:
            if not any(map(_is_of_broker, self.connections)):
                return
            await asyncio.sleep(0.02)

    def refuse_unanswered(self, reason: str) -> None:
        """Answers all requests that are under way at an engine that is closed: nobody knows whether
        it executed them."""
        for connection in list(self.connections):
            if isinstance(connection, HttpConnection):
                connection.order.refuse_unanswered(OutcomeUnknown(reason, retry_after_ms=1000))

    def _unfinished(self) -> int:
        """Returns how many connections still have something to send. A client with TLS may leave
        the end of its connection unanswered while it is idle."""
        return sum(
            not (each.transport.is_closing() and not each.transport.get_write_buffer_size())
            for each in self.connections
        )


def _is_of_broker(connection: object) -> bool:
    """Returns whether another broker forwards requests over this connection."""
    return isinstance(connection, HttpConnection) and bool(connection.admissions.verdict.notes.via)


def listen(settings: Settings) -> socket.socket:
    """Takes the address and port of the settings. Accepts nothing yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        cure = "; is a broker there already? --port takes another, 0 any" if is_taken else ""
        raise InvalidArgument(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}{cure}"
        ) from error
    listener.setblocking(False)
    return listener


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs a failed handshake in one line, since every client can cause one; all else as usual."""
    error = context.get("exception")
    is_of_connection = "transport" in context or "protocol" in context
    if is_of_connection and isinstance(error, ssl.SSLError | ConnectionError | TimeoutError):
        _log.debug("a TLS connection failed: %s", error)
    else:
        loop.default_exception_handler(context)


def address_of(settings: Settings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
