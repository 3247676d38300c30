"""One connection with no socket under it, on a broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.engine.embedded import EmbeddedEngine
from penstock.engine.opening import open_in_memory
from penstock.engine.scheduler import LoopScheduler
from penstock.model.limits import Limits
from penstock.server.http.admission import Admission
from penstock.server.http.connection import HttpConnection
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.identity.authenticator import Authenticator
from penstock.server.identity.expulsion import CredentialWatch
from penstock.server.pages import WebPages
from penstock.server.routes.table import ROUTES, path_route

PAGES = WebPages().routes()


class Transport(asyncio.Transport):
    """Takes everything, and says when it is closed."""

    def __init__(self) -> None:
        super().__init__({"socket": None, "peername": ("127.0.0.1", 1), "sockname": None})
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    def resume_reading(self) -> None:
        """Nothing comes by itself."""


class MemoryConnection:
    """`is_remembering` False: the broker caches neither heads nor verdicts. `authenticate` makes
    the authenticator of a broker with access control; connections are then closed with their
    credentials."""

    def __init__(
        self,
        *,
        is_remembering: bool = True,
        authenticate: Callable[[EmbeddedEngine], Authenticator] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.engine = open_in_memory(Limits(), LoopScheduler(loop))
        authenticator = None if authenticate is None else authenticate(self.engine)
        self.connections: set[Any] = set()
        self.dispatch = RequestDispatch(
            self.engine,
            Admission(loopback_only=True, authenticator=authenticator),
            ROUTES | PAGES,
            path_route,
            request_timeout_ms=60_000,
            idle_timeout_ms=60_000,
            is_remembering=is_remembering,
        )
        if authenticator is not None:
            self.watch = CredentialWatch(self.dispatch, self.connections, authenticator)
            self.engine.tokens.listen(self.watch.changed)
        self.connect()

    def connect(self) -> None:
        """A new connection to the same broker; the one before is forgotten."""
        self.protocol: Any = HttpConnection(self.dispatch, self.connections)
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    async def rest(self, turns: int = 10) -> None:
        """Lets the broker do what it has to do at once."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def until_written(self, mark: bytes) -> None:
        async with asyncio.timeout(5):
            while mark not in self.transport.written:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

    async def topic(self) -> None:
        created = asyncio.get_running_loop().create_future()
        self.engine.create_topic("t", 1, created.set_result)
        await created


def on_a_connection(test: Callable[[MemoryConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        connection = MemoryConnection()
        await connection.topic()
        try:
            await test(connection)
        finally:
            connection.protocol.connection_lost(None)
            connection.engine.close()

    asyncio.run(run())
