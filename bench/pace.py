"""Sends at a steady pace, whatever the broker does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICK_S = 0.002


async def keep_pace(per_second: int, seconds: float, send: Callable[[int], None]) -> None:
    """Calls `send` with 0, 1, 2 and so on at a steady pace; an error from `send` ends it."""
    began = time.perf_counter()
    count = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        while count < elapsed * per_second:
            send(count)
            count += 1
        await asyncio.sleep(_TICK_S)
