"""Notices that another broker's process is gone, long before its lease has run out.

A probe holds a connection to the broker's port. When the connection ends and a new one to the same
address is refused, no process listens there any more. A probe may be wrong, if something on the way
refuses connections. Then a live owner is deposed: it can store nothing any more, but until it hears
of that, or its lease has run out, it may answer reads from memory. Must not know leases, nor what
is spoken on the port.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from penstock.cluster.shared import Tail

CONNECT_TIMEOUT_S = 1.0
AGAIN_S = 0.5
"""The pause before an address is tried again that was not reached, or that closed at once."""


READ_BYTES = 4096

logger = logging.getLogger("penstock.cluster")


class Probe(Protocol):
    def watch(self, url: str, gone: Callable[[], None], *, was_reached: bool) -> Tail:
        """Calls `gone`, at most once and not within the call, when the process that serves at `url`
        has ended. It never does so for an address that was not reached, now or (`was_reached`)
        before."""
        ...


class TcpProbe:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def watch(self, url: str, gone: Callable[[], None], *, was_reached: bool) -> Tail:
        return _TcpWatch(self._loop, url, gone, was_reached=was_reached)


class _TcpWatch:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        gone: Callable[[], None],
        *,
        was_reached: bool,
    ) -> None:
        self._loop = loop
        self._gone = gone
        self._was_reached = was_reached
        self._task = loop.create_task(self._run(url))

    def close(self) -> None:
        self._task.cancel()

    async def _run(self, url: str) -> None:
        address = _address_of(url)
        if address is None:
            logger.warning("the owner's address %r cannot be probed", url)
            return
        while True:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(*address)
            except (OSError, TimeoutError, ValueError) as error:
                if self._was_reached and isinstance(error, ConnectionRefusedError):
                    self._gone()
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            # A name may have several addresses, and another one may refuse.
            address = _peer_of(writer) or address
            self._was_reached = True
            since = self._loop.time()
            await _read_to_end(reader, writer)
            if self._loop.time() - since < AGAIN_S:
                await asyncio.sleep(AGAIN_S)


async def _read_to_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass
    finally:
        writer.close()


def _address_of(url: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname else None


def _peer_of(writer: asyncio.StreamWriter) -> tuple[str, int] | None:
    """Returns the address that a connection has reached."""
    peer: Any = writer.get_extra_info("peername")
    return (peer[0], peer[1]) if isinstance(peer, tuple) else None
