"""One connection to one NATS server, from its first byte to its last.

Owns the handshake (INFO, TLS, CONNECT, the first PONG), the parser, and noticing that the server is
silent. Hands what arrives to its owner. Never connects again: that is `connection.py`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from penstock import __version__
from penstock.cluster.jetstream import wire
from penstock.cluster.jetstream.addresses import NatsAddress
from penstock.cluster.jetstream.errors import NatsConnectFailed, NatsError, NatsProtocolError
from penstock.cluster.jetstream.wire import NatsInfo, NatsMessage, NatsRefusal

CONNECT_TIMEOUT_S = 3.0
"""How long one server may take from the first packet to its PONG."""
PING_INTERVAL_S = 1.0
SILENT_TICKS = 3
"""A server that says nothing in so many intervals is gone. Intervals are counted, not a clock: a
broker that was paused itself hears the server before it counts again."""
LOGIN = "it does not know the user, password or token of its address"
UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""A server that takes nothing any more is given no more than this."""


class NatsSession(asyncio.Protocol):
    """Created before its transport. `lost` is called once, if the handshake succeeded."""

    def __init__(
        self,
        address: NatsAddress,
        loop: asyncio.AbstractEventLoop,
        received: Callable[[NatsMessage], None],
        refused: Callable[[str], None],
        lost: Callable[[NatsSession, str], None],
    ) -> None:
        self.address = address
        self.info = NatsInfo()
        self._loop = loop
        self._received = received
        self._refused = refused
        self._lost = lost
        self._parser = wire.NatsParser()
        self._transport: asyncio.Transport | None = None
        self._hello: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._is_open = False
        self._reason = ""
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, tls: ssl.SSLContext | None, name: str) -> None:
        """Raises NatsConnectFailed, with a reason that has no credentials in it."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._handshake(tls, name)
        except TimeoutError:
            self.abort("it does not answer")
            raise NatsConnectFailed("it does not answer") from None
        except (OSError, UnicodeError, NatsError) as error:  # UnicodeError: not a host's name
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.abort(reason)
            raise NatsConnectFailed(reason) from error
        except BaseException:
            self.abort("the broker stops")
            raise
        self._is_open = True
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._tick)

    @property
    def is_congested(self) -> bool:
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > UNSENT_BYTES_MAX

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived in part."""
        return self._parser.is_amid_message

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self, reason: str) -> None:
        """Ends the connection at once. `lost` is called in a later turn."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of uvloop are of no class of asyncio.
        self._transport = stream = cast(asyncio.Transport, transport)
        if self._reason:
            stream.abort()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        try:
            events = self._parser.feed(data)
        except NatsProtocolError as error:
            self._fail(str(error))
            return
        for event in events:
            if isinstance(event, NatsMessage):
                self._received(event)
            else:
                self._take(event)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(str(error) if error else "the server closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        if self._is_open:
            self._is_open = False
            self._lost(self, self._reason)

    # -- inside -------------------------------------------------------------------------------

    async def _handshake(self, tls: ssl.SSLContext | None, name: str) -> None:
        host, port = self.address.host, self.address.port
        await self._loop.create_connection(lambda: self, host, port)
        await self._hello
        await self._secure(tls)
        options = self.address.credentials.options() | {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": __version__,
            "name": name,
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "tls_required": self.address.needs_tls,
        }
        self.write(wire.connect(options) + wire.PING)
        await self._ready
        if self._transport is None:
            raise NatsConnectFailed(self._reason)
        if not self.info.headers:
            raise NatsConnectFailed(
                f"nats-server {self.info.version} is too old: it has no headers"
            )

    async def _secure(self, tls: ssl.SSLContext | None) -> None:
        """Begins TLS if this side or the server requires it. Without it credentials are not sent
        to a server that was named with tls://."""
        offers = self.info.tls_required or self.info.tls_available
        if self.address.needs_tls and not offers:
            raise NatsConnectFailed("it has no TLS, but its address says tls://")
        if not self.address.needs_tls and not self.info.tls_required:
            return
        if self._transport is None:
            raise NatsConnectFailed("the server closed the connection")
        secured = await self._loop.start_tls(
            self._transport,
            self,
            tls or ssl.create_default_context(),
            server_hostname=self.address.host,
        )
        if secured is None:
            raise NatsConnectFailed("the server closed the connection")
        self._transport = secured

    def _take(self, event: wire.NatsEvent) -> None:
        match event:
            case NatsInfo():
                self.info = event
                if not self._hello.done():
                    self._hello.set_result(None)
                if event.ldm and self._is_open:
                    self.abort("the server is in lame-duck mode")
            case wire.NatsPing():
                self.write(wire.PONG)
            case wire.NatsPong():
                if not self._ready.done():
                    self._ready.set_result(None)
            case NatsRefusal(text):
                if not self._is_open:
                    is_login = text.lower() == "authorization violation"
                    self._fail(f"{text}: {LOGIN}" if is_login else text)
                else:
                    self._refused(text)

    def _fail(self, reason: str) -> None:
        self.abort(reason)
        for each in (self._hello, self._ready):
            if not each.done():
                each.set_exception(NatsConnectFailed(self._reason))
                each.exception()  # Nobody may wait for it any more.

    def _tick(self) -> None:
        self._silent_ticks += 1
        if self._silent_ticks > SILENT_TICKS:
            self.abort(f"it said nothing for {SILENT_TICKS * PING_INTERVAL_S:.0f} s")
            return
        self.write(wire.PING)
        self._timer = self._loop.call_later(PING_INTERVAL_S, self._tick)
