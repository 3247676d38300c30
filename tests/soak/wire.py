"""HTTP over asyncio for clients whose broker may die at any byte: any method, and endless lines.

An answer counts when it came whole; everything else is Lost, and its outcome unknown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tests.crash.wire import Connection, Lost, Stream

__all__ = ["Answer", "Lines", "Lost", "Wire"]

ANSWER_TIMEOUT_S = 90.0


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    def __str__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


class Wire(Connection):
    """One request at a time. Use it in an `async with`."""

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """`body` is sent as it is if it is bytes, else as JSON."""
        content = b"" if body is None else body
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        try:
            self._writer.write(head.encode() + content)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, length = await self._read_head()
                return Answer(status, await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost(error) from error

    async def lines(self, path: str, parameters: Mapping[str, object]) -> Lines | Answer:
        """An endless answer; or the refusal."""
        target = f"{path}?{urlencode(parameters)}"
        try:
            self._writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, length = await self._read_head()
                if status == 200:
                    return Lines(self._reader)
                return Answer(status, await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self._lost(error) from error


class Lines(Stream):
    """Objects as they come; none when the stream has ended."""
