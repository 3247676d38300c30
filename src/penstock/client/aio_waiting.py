"""Waiting with asyncio: the parts of the clients that `sync_waiting` has to do differently.

Both modules are written by hand and offer the same names. The other `sync*.py` modules are
generated from their `aio*.py` counterparts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx

time_limit = asyncio.timeout
"""Ends a block with TimeoutError after so many seconds."""


pause = asyncio.sleep


async def close_response(response: httpx.Response) -> None:
    await response.aclose()


class AsyncStopFlag:
    """Tells a worker to stop. Set it in the thread of the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits until the flag is set, at most `seconds`. Returns whether it is set."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        return self._event.is_set()
