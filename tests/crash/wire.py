"""HTTP over asyncio sockets, for a load whose broker may die at any byte.

Owns the bytes: a reply counts when it came whole, an item when its line did. Everything else is
`Lost`: the outcome is unknown. It must not know what requests mean.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

REPLY_TIMEOUT_S = 60.0


class Lost(Exception):
    """The connection broke: the request may or may not have been carried out."""


class Reply(NamedTuple):
    status: int
    body: bytes


class Connection:
    """One connection, one request at a time. Use it in an `async with`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        try:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            raise Lost from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def post(self, path: str, body: object) -> Reply:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        try:
            self._writer.write(head.encode() + content)
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                status, length = await self._read_head()
                return Reply(status, await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost(error) from error

    async def open_stream(self, parameters: Mapping[str, object]) -> Stream:
        target = "/v1/consume?" + urlencode(parameters)
        try:
            self._writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                status, _ = await self._read_head()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost(error) from error
        assert status == 200, f"{target} answered {status}"
        return Stream(self._reader)

    async def _read_head(self) -> tuple[int, int]:
        """The status, and the length of the body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        _, found, length = head.partition("content-length:")
        return int(head.split(" ", 2)[1]), int(length.split("\r\n", 1)[0]) if found else 0

    def _lost(self, error: Exception) -> Lost:
        """A broker that is silent for so long has hung, which no crash excuses."""
        assert not isinstance(error, TimeoutError), f"no answer within {REPLY_TIMEOUT_S} s"
        return Lost()


class Stream:
    """A consume stream: the items of each chunk, until the connection ends."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._half_line = b""

    async def read(self) -> list[dict[str, Any]]:
        """The items that came together; none when the stream has ended."""
        while True:
            try:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                chunk = (await self._reader.readexactly(size + 2))[:size]
            except (OSError, asyncio.IncompleteReadError):
                return []
            *lines, self._half_line = (self._half_line + chunk).split(b"\n")
            items = [json.loads(line) for line in lines if line]
            if items or not size:
                return items
