"""Requests to read now what is only in the log, and the sealing runs made for them.

Invariant: each request is answered once: when all that was durable at the request is sealed, or
with the reason why it is not. All requests that wait share a run. A run costs a process and a new
segment, so after one the next must wait for several times its duration.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from penstock.engine.clock import Clock
from penstock.engine.ledger import Then
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import MAX_FRESH_WAIT_MS
from penstock.storage.frames import POSITION_BITS
from penstock.storage.log import Log

REST_FACTOR = 5
"""Runs made for requests take at most a sixth of the time."""
MIN_REST_MS = 500


class Runs(Protocol):
    """Sealing, one run at a time."""

    @property
    def is_running(self) -> bool: ...

    def run(self) -> None:
        """Starts a run if there is a closed segment and none is under way."""
        ...


class SealRequests:
    def __init__(self, log: Log, clock: Clock, scheduler: Scheduler, runs: Runs) -> None:
        self._log = log
        self._clock = clock
        self._scheduler = scheduler
        self._runs = runs
        # For each request: the last frame to be sealed, its time, and its callback.
        self._waiting: deque[tuple[int, int, Then]] = deque()
        self._rolled = 0
        self._is_asked = False
        self._rest_until_ms = 0
        self._alarm: Cancellable | None = None

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def catch_up(self, then: Then) -> None:
        """Calls `then` when everything that is durable now is sealed."""
        wanted = self._log.durable_seq
        if self._is_sealed(wanted):
            then(None)
        else:
            self._waiting.append((wanted, self._clock.now_ms(), then))
            self._go_on()

    def run_ended(self, cost_ms: int) -> None:
        if self._is_asked:
            self._is_asked = False
            rest_ms = max(MIN_REST_MS, REST_FACTOR * cost_ms)
            self._rest_until_ms = self._clock.now_ms() + rest_ms
        while self._waiting and self._is_sealed(self._waiting[0][0]):
            self._waiting.popleft()[2](None)
        self._go_on()

    def give_up(self, failure: PenstockError) -> None:
        """Answers all requests with `failure`: a run failed, or there will be none."""
        waiting, self._waiting = self._waiting, deque()
        for _, _, then in waiting:
            then(failure)

    def housekeep(self) -> None:
        """Refuses requests that waited too long. Called about once a second."""
        oldest_ms = self._clock.now_ms() - MAX_FRESH_WAIT_MS
        while self._waiting and self._waiting[0][1] < oldest_ms:
            failure = Unavailable("the log could not be sealed in time; try again")
            self._waiting.popleft()[2](failure)

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.give_up(Unavailable("the broker is stopping"))

    def _is_sealed(self, seq: int) -> bool:
        return self._log.first_position >> POSITION_BITS > seq

    def _go_on(self) -> None:
        """Asks for the run that waiting requests need, as soon as the rest is over."""
        if not self._waiting or self._alarm is not None or self._runs.is_running:
            return
        rest_ms = self._rest_until_ms - self._clock.now_ms()
        if rest_ms > 0:
            self._alarm = self._scheduler.later(rest_ms, self._ring)
            return
        if self._waiting[-1][0] > self._rolled:
            self._rolled = self._log.durable_seq
            self._is_asked = True
            self._log.roll()
        self._runs.run()

    def _ring(self) -> None:
        self._alarm = None
        self._go_on()
