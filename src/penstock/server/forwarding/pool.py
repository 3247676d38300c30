"""The connections to one owner, kept open and used again.

A connection has requests of one sender only: the same credential, tenant and namespace. So what the
owner does to a connection because of its sender (a token that is revoked, a quota) meets nobody
else. Quick requests of a sender share a few connections, which saves both brokers a read and a
write for each; every other request has a connection to itself while it is under way. Must not know
what becomes of requests.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from penstock.model.errors import InvalidArgument
from penstock.model.limits import KIB
from penstock.server.forwarding.exchange import Exchange
from penstock.server.forwarding.upstream import UpstreamConnection
from penstock.server.http.forwarded_head import VIA_HEADER

IDLE_S = 30.0
"""How long an idle connection is kept. The owner keeps it longer, so that it rarely closes one at
the moment at which a request is written."""

SHARED_REQUESTS = 32
"""Requests under way on a shared connection; the owner reads no more than 64."""
SLOW_S = 0.05
"""A shared connection whose first request has waited for so long gets no others behind it."""

CONNECT_TIMEOUT_S = 2.0
UNACKNOWLEDGED_MS = 10_000
"""How long the owner's machine may leave bytes unacknowledged before its connection is given up."""

RECEIVE_BUFFER_BYTES = 128 * KIB
"""Bytes of an owner's answers that the system holds while they are not read. Kept small, because
the owner sees only by them whether the client still reads."""

Sender = bytes
"""Header lines that identify a sender."""

_SENDER_LINES = (b"authorization:", b"x-penstock-tenant:", b"x-penstock-namespace:")

NewTls = Callable[[], ssl.SSLContext]


def sender_of(forwarded_head: bytes) -> Sender:
    lines = forwarded_head.split(b"\r\n")
    return b"\n".join(line for line in lines if line.startswith(_SENDER_LINES))


class UpstreamPool:
    """`url` is the address of the owner, `name` that of this broker."""

    def __init__(
        self, url: str, name: str, loop: asyncio.AbstractEventLoop, new_tls: NewTls
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self.loop = loop
        self._new_tls = new_tls
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_tls else 80)
        self.owner_head = b"host: %b\r\n%b: %b\r\n" % (
            parts.netloc.encode(), VIA_HEADER, name.encode(),
        )  # fmt: skip
        self._context: ssl.SSLContext | None = None
        self._senders: dict[bytes, Sender] = {}
        self._idle: dict[Sender, list[UpstreamConnection]] = {}
        self._shared: dict[Sender, list[UpstreamConnection]] = {}
        self._sender_by_connection: dict[UpstreamConnection, Sender] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Returns the number of connections, those in the making too."""
        return len(self._sender_by_connection)

    def send(self, exchange: Exchange) -> None:
        """Sends the request over a connection that is free, or over a new one."""
        sender = self._sender(exchange)
        connection = self._shared_for(sender) if exchange.is_quick else self._idle_for(sender)
        if connection is None:
            connection = self.connect(sender, is_shared=exchange.is_quick)
        connection.add(exchange)

    def send_alone(self, exchange: Exchange) -> UpstreamConnection:
        """Sends the request over a connection that is then not used for any other."""
        connection = self.connect(self._sender(exchange), is_shared=False)
        connection.is_usable = False
        connection.add(exchange)
        return connection

    def connect(self, sender: Sender, *, is_shared: bool) -> UpstreamConnection:
        """Returns a connection that is about to be made."""
        connection = UpstreamConnection(self, is_shared=is_shared)
        self._sender_by_connection[connection] = sender
        if is_shared:
            self._shared.setdefault(sender, []).append(connection)
        task = self.loop.create_task(self._connect(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return connection

    def retire(self) -> None:
        """Makes no more use of the owner. Answers that are under way may still come."""
        for connection in list(self._sender_by_connection):
            connection.retire()

    def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        for connection in list(self._sender_by_connection):
            connection.abort()

    def close_idle(self, now: float) -> None:
        """Closes connections that nobody has used for a while."""
        for connection in list(self._sender_by_connection):
            is_idle = connection.transport is not None and not connection.exchanges
            if is_idle and connection.is_usable and now - connection.idle_since > IDLE_S:
                connection.retire()

    # -- called by connections -------------------------------------------------------------------

    def freed(self, connection: UpstreamConnection) -> None:
        """All its answers have come."""
        connection.idle_since = self.loop.time()
        if not connection.is_usable:
            connection.retire()
        elif not connection.is_shared:
            sender = self._sender_by_connection[connection]
            self._idle.setdefault(sender, []).append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """It is closed, or is no connection of the pool any more."""
        sender = self._sender_by_connection.pop(connection, None)
        if sender is None:
            return
        for kept in (self._idle, self._shared):
            if connection in (connections := kept.get(sender, [])):
                connections.remove(connection)
                if not connections:
                    del kept[sender]

    # -- within ----------------------------------------------------------------------------------

    def _sender(self, exchange: Exchange) -> Sender:
        head = exchange.request.notes.forwarded_head
        sender = self._senders.get(head)
        if sender is None:
            if len(self._senders) > 4096:
                self._senders.clear()
            sender = self._senders[head] = sender_of(head)
        return sender

    def _idle_for(self, sender: Sender) -> UpstreamConnection | None:
        idle = self._idle.get(sender)
        while idle:
            connection = idle.pop()
            if connection.is_open():
                return connection
        return None

    def _shared_for(self, sender: Sender) -> UpstreamConnection | None:
        for connection in self._shared.get(sender, ()):
            exchanges = connection.exchanges
            if not connection.is_open() or connection.is_write_paused:
                continue
            if len(exchanges) >= SHARED_REQUESTS:
                continue
            if (
                exchanges
                and exchanges[0].sent_at
                and (self.loop.time() - exchanges[0].sent_at > SLOW_S)
            ):
                continue
            return connection
        return None

    async def _connect(self, connection: UpstreamConnection) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, _ = await self.loop.create_connection(
                    lambda: connection,
                    self._host,
                    self._port,
                    ssl=self._tls(),
                    server_hostname=self._host if self._is_tls else None,
                )
        except (OSError, ssl.SSLError, TimeoutError, InvalidArgument) as error:
            self.lost(connection)
            reason = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
            connection.failed(f"{self.url}: {reason}")
            return
        raw = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)

    def _tls(self) -> ssl.SSLContext | None:
        if self._is_tls and self._context is None:
            self._context = self._new_tls()
        return self._context
