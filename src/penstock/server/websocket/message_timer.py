"""The time that a message of a WebSocket may take to arrive whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class MessageTimer:
    """Calls `expired` when the rest of a message should have come by now. A byte now and then, or a
    ping between its fragments, does not prolong it: only `allowed_s` does, which is asked again."""

    def __init__(self, allowed_s: Callable[[], float], expired: Callable[[], None]) -> None:
        self._allowed_s = allowed_s
        self._expired = expired
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Starts the time of a message, unless it has started already."""
        if self._began is None:
            self._began = self._loop.time()
            if self._timer is None:
                self._check()

    def stop(self) -> None:
        """Forgets the message: it has come, or the broker itself has stopped reading."""
        self._began = None

    def close(self) -> None:
        self._began = None
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._began is None:
            return
        due_s = self._began + self._allowed_s()
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._check)
        else:
            self._expired()
