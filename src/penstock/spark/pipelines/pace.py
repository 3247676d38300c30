"""Limits the rate of a replay to a number of rows a second, in chunks.

Invariant: in any span of time, at most the rows that the rate allows are written, and one chunk
more. So the pause is counted from the end of a chunk's write: counted from its beginning, a slow
write and a fast one could follow each other too closely. Lost time is not made up for by a burst.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_CHUNK_ROWS = 1_000_000
"""The largest chunk of a replay without a rate: the broker stages a chunk as a whole on its
disk."""


class Pace:
    """`rate` is in rows a second; None means as fast as possible."""

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
        """The rows of about one second."""
        if self._rate is None:
            return MAX_CHUNK_ROWS
        return min(MAX_CHUNK_ROWS, max(1, round(self._rate)))

    def await_turn(self) -> None:
        """Waits until the next chunk may be written."""
        pause = self._next - self._clock()
        if pause > 0:
            self._sleep(pause)

    def written(self, rows: int) -> None:
        """Starts the pause after a chunk of `rows`."""
        if self._rate is not None:
            self._next = self._clock() + rows / self._rate
