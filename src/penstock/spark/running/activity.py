"""An activity of a run: a streaming query or a job, its progress and how it ended.

Invariant: an activity ends once, in one way, and keeps the error that made it fail. Its counters
are for people; nothing is decided by them. Must not know Spark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

POLL_S = 0.05

State = Literal["waiting", "running", "finished", "stopped", "failed", "skipped"]


class Activity:
    """One thread updates it, others read it."""

    kind = "activity"

    def __init__(self, pipeline: str, name: str) -> None:
        self.pipeline = pipeline
        self.name = name
        self.state: State = "running"
        self.error: BaseException | None = None
        self.batches = 0
        self.last_batch: int | None = None
        """The number of the last batch that was started."""
        self.rows = 0
        self.lag: int | None = None
        """Rows that are there and not read yet; None if that is not known."""
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
        """Starts the clock, when the activities it waits for have ended."""
        with self._once:
            if self.is_running:
                self.state = "running"
                self._began = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether it has ended."""
        return self._end.wait(timeout_s)

    def wait_patiently(
        self,
        patience_s: float,
        hurry: threading.Event | None = None,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Waits for its end or for `is_idle`. Returns False after `patience_s` or `hurry`."""
        deadline = time.monotonic() + patience_s
        while not (self.wait(POLL_S) or is_idle()):
            if time.monotonic() > deadline or (hurry is not None and hurry.is_set()):
                return False
        return True

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Sets how it ended; later calls change nothing."""
        with self._once:
            if self._end.is_set():
                return
            self.state, self.error = state, error
            self._ended = time.monotonic()
            self._end.set()

    def stop(self, patience_s: float, hurry: threading.Event | None = None) -> None:
        """Ends it where nothing is half done: after its current batch, or by cancelling that batch
        if it takes longer than `patience_s` or `hurry` is set."""
        raise NotImplementedError

    def count(self) -> None:
        """Updates `rows` and `lag`; may ask the broker."""

    def where(self) -> str:
        return f"pipeline {self.pipeline}, {self.kind} {self.name}"
