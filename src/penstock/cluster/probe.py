"""Notices that another broker's process is gone, long before its lease has run out.

A probe holds a connection to the broker's port. When the connection ends and a new one is refused,
no process listens there any more. A probe may be wrong, so nothing but speed may depend on it. Must
not know leases, nor what is spoken on the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from penstock.cluster.shared import Tail

CONNECT_TIMEOUT_S = 1.0
AGAIN_S = 0.5
"""The pause before an address is tried again that was not reached, or that closed at once."""


class Probe(Protocol):
    def watch(self, url: str, gone: Callable[[], None]) -> Tail:
        """Calls `gone`, at most once, when the process that serves at `url` has ended. It never
        calls it for an address that it did not reach before."""
        ...


class TcpProbe:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def watch(self, url: str, gone: Callable[[], None]) -> Tail:
        return _TcpWatch(self._loop, url, gone)


class _TcpWatch:
    def __init__(self, loop: asyncio.AbstractEventLoop, url: str, gone: Callable[[], None]) -> None:
        self._loop = loop
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._gone = gone
        self._task = loop.create_task(self._run())

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        was_reached = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(self._host, self._port)
            except (OSError, TimeoutError) as error:
                if was_reached and isinstance(error, ConnectionRefusedError):
                    self._gone()
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            was_reached = True
            since = self._loop.time()
            try:
                await reader.read()
            except OSError:
                pass
            finally:
                writer.close()
            if self._loop.time() - since < AGAIN_S:
                await asyncio.sleep(AGAIN_S)
