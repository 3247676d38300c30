"""Gives the engine its turns: on an event loop, or by hand in a test."""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

Turn = Callable[[], None]

_log = logging.getLogger("penstock.engine")


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Scheduler(Protocol):
    def soon(self, turn: Turn) -> None:
        """Runs `turn` after what is running now. Only from the loop's thread."""
        ...

    def later(self, delay_ms: int, turn: Turn) -> Cancellable: ...

    def post(self, turn: Turn) -> None:
        """Runs `turn` like `soon`. May be called from any thread."""
        ...

    def in_thread(self, work: Turn) -> None:
        """Runs blocking work elsewhere; it reports back with `post`."""
        ...

    def in_background(self, work: Turn) -> None:
        """Runs work like `in_thread`, for long work that nobody else should wait behind."""
        ...

    def close(self) -> None: ...


class LoopScheduler:
    """The scheduler of a running asyncio (or uvloop) event loop.

    After `close`, new work for threads is dropped, as a kill would drop it: the log's last commit
    may still ask for some, for example to remove files that the next start removes too.
    """

    READERS = 2
    BACKGROUND = 2

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_closed = False
        self._readers = ThreadPoolExecutor(self.READERS, thread_name_prefix="penstock-reader")
        self._background = ThreadPoolExecutor(
            self.BACKGROUND, thread_name_prefix="penstock-background"
        )

    def soon(self, turn: Turn) -> None:
        self._loop.call_soon(turn)

    def later(self, delay_ms: int, turn: Turn) -> Cancellable:
        return self._loop.call_later(delay_ms / 1000, turn)

    def post(self, turn: Turn) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(turn)

    def in_thread(self, work: Turn) -> None:
        if not self._is_closed:
            self._readers.submit(_logged, work)

    def in_background(self, work: Turn) -> None:
        if not self._is_closed:
            self._background.submit(_logged, work)

    def close(self) -> None:
        self._is_closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=False, cancel_futures=True)


def _logged(work: Turn) -> None:
    """Logs exceptions: a pool keeps them to itself."""
    try:
        work()
    except Exception:  # noqa: BLE001 - whatever it was, the log says so
        _log.exception("work on a thread failed, and nobody was told its outcome")


class _Timer:
    def __init__(self, turn: Turn) -> None:
        self.turn: Turn | None = turn

    def cancel(self) -> None:
        self.turn = None


class ManualScheduler:
    """Turns run only when a test says so: `run()` until idle, `advance()` to move time.

    `in_thread` runs at once: a test sees one order of events, always the same.
    """

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._timers: list[tuple[int, int, _Timer]] = []
        self._now_ms = 0
        self._count = 0
        self._posted = threading.Event()

    def soon(self, turn: Turn) -> None:
        self._turns.append(turn)

    def post(self, turn: Turn) -> None:
        self._turns.append(turn)
        self._posted.set()

    def later(self, delay_ms: int, turn: Turn) -> Cancellable:
        timer = _Timer(turn)
        self._count += 1
        heapq.heappush(self._timers, (self._now_ms + delay_ms, self._count, timer))
        return timer

    def in_thread(self, work: Turn) -> None:
        work()

    def in_background(self, work: Turn) -> None:
        self.in_thread(work)

    def close(self) -> None:
        self._turns.clear()
        self._timers.clear()

    def run(self) -> None:
        while self._turns:
            self._turns.popleft()()

    def run_until(self, is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Runs turns, waiting for other threads' posts, until `is_true`."""
        while True:
            self._posted.clear()
            self.run()
            if is_true():
                return
            if not self._posted.wait(timeout_s):
                raise TimeoutError("nothing was posted in time")

    def advance(self, ms: int) -> None:
        self._now_ms += ms
        while self._timers and self._timers[0][0] <= self._now_ms:
            turn = heapq.heappop(self._timers)[2].turn
            if turn is not None:
                turn()
            self.run()
