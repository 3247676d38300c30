"""How fast rows are sent: no more than so many a second, counted from when each chunk began.

Invariant: from the beginning of one chunk to that of the next pass at least as many seconds as its
rows are allowed; time that was lost is not made up for by a burst.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_CHUNK_ROWS = 1_000_000
"""Of a replay without a rate: it is staged whole on the broker's disk before it is stored."""


class Pace:
    """`rate` is rows a second; None is as fast as it goes."""

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._next = -math.inf

    @property
    def chunk_rows(self) -> int:
        """About a second's worth."""
        if self._rate is None:
            return MAX_CHUNK_ROWS
        return min(MAX_CHUNK_ROWS, max(1, round(self._rate)))

    def await_turn(self, rows: int) -> None:
        """Returns when `rows` may be sent."""
        if self._rate is None:
            return
        pause = self._next - self._clock()
        if pause > 0:
            self._sleep(pause)
        self._next = self._clock() + rows / self._rate
