"""One thing that a run does: a streaming query or a job, how far it has come and how it ended.

Invariant: an activity ends once, in one way, and what made it fail stays with it. Its counters are
for people; nothing is decided by them. Must not know Spark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

LOOK_S = 0.05

State = Literal["waiting", "running", "finished", "stopped", "failed", "skipped"]


class Activity:
    """Counted by one thread, read by others."""

    kind = "activity"

    def __init__(self, pipeline: str, name: str) -> None:
        self.pipeline = pipeline
        self.name = name
        self.state: State = "running"
        self.error: BaseException | None = None
        self.batches = 0
        self.last_batch: int | None = None
        """The number of the last that was begun."""
        self.rows = 0
        self.lag: int | None = None
        """Rows that are there and not taken; None: nobody knows."""
        self._began = time.monotonic()
        self._ended: float | None = None
        self._end = threading.Event()
        self._once = threading.Lock()

    @property
    def is_running(self) -> bool:
        return not self._end.is_set()

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    def begin(self) -> None:
        """What was waited for is there: the time counts from now."""
        with self._once:
            if self.is_running:
                self.state = "running"
                self._began = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Has it ended?"""
        return self._end.wait(timeout_s)

    def bear_with(
        self,
        patience_s: float,
        hurry: threading.Event | None = None,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits for its end, or until it does nothing. False: it does not come."""
        deadline = time.monotonic() + patience_s
        while not (self.wait(LOOK_S) or is_idle()):
            if time.monotonic() > deadline or (hurry is not None and hurry.is_set()):
                return False
        return True

    def end(self, state: State, error: BaseException | None = None) -> None:
        """The first time counts."""
        with self._once:
            if self._end.is_set():
                return
            self.state, self.error = state, error
            self._ended = time.monotonic()
            self._end.set()

    def stop(self, patience_s: float, hurry: threading.Event | None = None) -> None:
        """Ends it where nothing is half done: after what it is doing, or, if that takes longer
        than `patience_s` or `hurry` is set, by giving that up."""
        raise NotImplementedError

    def count(self) -> None:
        """Brings `rows` and `lag` up to date; may ask the broker."""

    def where(self) -> str:
        return f"pipeline {self.pipeline}, {self.kind} {self.name}"
