"""Where time comes from. Engine time is wall-clock milliseconds that never go back."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int: ...

    def start_at(self, floor_ms: int) -> None:
        """Time goes on from `floor_ms` at least: what an earlier process wrote is in the past."""
        ...


class SystemClock:
    """The wall clock, carried on by the monotonic one when it is set back."""

    __slots__ = ("_base_ms", "_started")

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._base_ms = time.time() * 1000

    def start_at(self, floor_ms: int) -> None:
        self._base_ms = max(self._base_ms, floor_ms)

    def now_ms(self) -> int:
        carried = self._base_ms + (time.monotonic() - self._started) * 1000
        wall = time.time() * 1000
        if wall > carried:
            self._base_ms += wall - carried
            return int(wall)
        return int(carried)


class ManualClock:
    """Time that a test moves."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def start_at(self, floor_ms: int) -> None:
        self._now_ms = max(self._now_ms, floor_ms)

    def advance(self, ms: int) -> None:
        self._now_ms += ms
