"""Calls of the shared services for threads, which wait for the answer.

Invariant: a call returns the outcome, or raises Unavailable once `end` was called; it never waits
for ever. The service is called on the loop's thread. Must not know which service it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from penstock.engine.scheduler import Scheduler
from penstock.model.errors import Unavailable

T = TypeVar("T")

LOOK_S = 0.5
"""How often a waiting thread looks whether it has to end."""


class ThreadCalls(Protocol):
    def call(self, start: Callable[[Callable[[T], None]], None]) -> T:
        """Runs `start` on the loop, and returns what it gives to its argument."""
        ...

    def pause(self, ms: int) -> None: ...

    def end(self) -> None:
        """Threads that wait are told that the broker's copy of the shard was closed."""
        ...


class LoopCalls:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._has_ended = threading.Event()

    def call(self, start: Callable[[Callable[[T], None]], None]) -> T:
        answered = threading.Event()
        outcomes: list[T] = []

        def done(outcome: T) -> None:
            outcomes.append(outcome)
            answered.set()

        self._scheduler.post(lambda: start(done))
        while not answered.wait(LOOK_S):
            if self._has_ended.is_set():
                raise closed()
        return outcomes[0]

    def pause(self, ms: int) -> None:
        if self._has_ended.wait(ms / 1000):
            raise closed()

    def end(self) -> None:
        self._has_ended.set()


def closed() -> Unavailable:
    return Unavailable("this broker no longer owns the shard; send the request again")
