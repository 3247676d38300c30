"""A proxy in front of one nats-server that loses what a network can lose.

Runs on the loop of the test. Loses whole directions and connections, never single bytes of a
connection that goes on: TCP does not do that either.
"""

from __future__ import annotations

import asyncio
import contextlib


class NatsProxy:
    """`swallows_answers` and `swallows_requests` lose everything of one direction. Connections
    should be cut afterwards. While `refuses`, nobody gets a connection."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.swallows_answers = False
        self.swallows_requests = False
        self.refuses = False
        self.bytes_per_s = 0
        """How fast each direction is; 0: as fast as it goes."""
        self.accepted = 0
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Breaks every connection, as a reset does."""
        for writer in list(self._writers):
            writer.transport.abort()

    def away(self) -> None:
        self.refuses = True
        self.cut()

    def back(self) -> None:
        """Everything passes again, on new connections."""
        self.refuses = self.swallows_answers = self.swallows_requests = False
        self.cut()

    async def close(self) -> None:
        self.away()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refuses:
            writer.transport.abort()
            return
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(back)
            await asyncio.gather(
                self._pump(reader, back, answers=False), self._pump(there, writer, answers=True)
            )
            self._writers.discard(back)
        self._writers.discard(writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(64 * 1024):
                if self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                is_lost = self.swallows_answers if answers else self.swallows_requests
                if not is_lost:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
