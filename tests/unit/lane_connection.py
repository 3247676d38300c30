"""One connection with no socket under it, on a broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from penstock.engine.opening import open_in_memory
from penstock.engine.scheduler import LoopScheduler
from penstock.model.limits import Limits
from penstock.server.app import make_app
from penstock.server.gate import Gate
from penstock.server.hub import Hub
from penstock.server.lane import Lane
from penstock.server.routes import ROUTES, path_route


class Transport(asyncio.Transport):
    """Takes everything, and says when it is closed."""

    def __init__(self) -> None:
        super().__init__({"socket": None, "peername": ("127.0.0.1", 1), "sockname": None})
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

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


class Connection:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.engine = open_in_memory(Limits(), LoopScheduler(loop))
        self.hub = Hub(
            self.engine,
            Gate(loopback_only=True),
            ROUTES,
            path_route,
            request_timeout_ms=60_000,
            idle_timeout_ms=60_000,
        )
        config = uvicorn.Config(
            make_app(self.hub), ws="none", lifespan="off", log_config=None, timeout_keep_alive=75
        )
        kind = type("BoundLane", (Lane,), {"hub": self.hub})
        self.lane: Any = kind(config=config, server_state=ServerState(), app_state={})
        self.transport = Transport()
        self.lane.connection_made(self.transport)

    async def until_written(self, mark: bytes) -> None:
        async with asyncio.timeout(5):
            while mark not in self.transport.written:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

    async def topic(self) -> None:
        created = asyncio.get_running_loop().create_future()
        self.engine.create_topic("t", 1, created.set_result)
        await created


def on_a_connection(test: Callable[[Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        connection = Connection()
        await connection.topic()
        try:
            await test(connection)
        finally:
            connection.lane.connection_lost(None)
            connection.engine.close()

    asyncio.run(run())
