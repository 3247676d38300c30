"""The rate of a replay: at most so many rows a second, in chunks.

Invariant: in any span of time, the rows that were written are at most what the rate allows for that
span, and one chunk more. So the pause is counted from the end of a chunk's write: from its
beginning, a slow write followed by a fast one would come too close together. Time that was lost is
not made up for by a burst.
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

    def await_turn(self) -> None:
        """Returns when the next chunk may be written."""
        pause = self._next - self._clock()
        if pause > 0:
            self._sleep(pause)

    def written(self, rows: int) -> None:
        """Call it when a chunk of `rows` has been written."""
        if self._rate is not None:
            self._next = self._clock() + rows / self._rate
