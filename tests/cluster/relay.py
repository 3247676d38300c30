"""Threads of a simulated broker that wait for a service: one of all threads runs at a time.

A `Relay` runs work on a thread of its own, until the work ends or waits. The simulation's thread
goes on then, and hands over again when the answer is there. So the same seed gives the same run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock.cluster.loop_calls import closed
from penstock.engine.scheduler import Scheduler, Turn

_here = threading.local()


class Relay:
    """One piece of work on its thread."""

    def __init__(self, work: Turn) -> None:
        self._work = work
        self._is_mine = threading.Event()
        self._is_yours = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        self._wait()

    def resume(self) -> None:
        """Lets the work go on until it ends or waits again."""
        self._is_mine.set()
        self._wait()

    def suspend(self) -> None:
        """Called by the work: lets the simulation go on until `resume`."""
        self._is_mine.clear()
        self._is_yours.set()
        self._is_mine.wait()

    def _wait(self) -> None:
        assert self._is_yours.wait(60), "the work of a thread neither ends nor waits"
        self._is_yours.clear()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        _here.relay = self
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again where the simulation runs
            self.failure = error
        self._is_yours.set()


def run_relayed(work: Turn) -> None:
    Relay(work).start()


class RelayedCalls:
    """`ThreadCalls` of work that `run_relayed` runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: set[Relay] = set()
        self._has_ended = False

    def call(self, start: Callable[[Callable[[Any], None]], None]) -> Any:
        outcomes: list[Any] = []
        relay: Relay = _here.relay

        def done(outcome: Any) -> None:
            outcomes.append(outcome)
            if relay in self._waiting:
                self._waiting.discard(relay)
                relay.resume()

        if self._has_ended:
            raise closed()
        self._scheduler.post(lambda: start(done))
        self._waiting.add(relay)
        relay.suspend()
        if not outcomes:
            raise closed()
        return outcomes[0]

    def pause(self, ms: int) -> None:
        self.call(lambda done: _later(self._scheduler, ms, done))

    def end(self) -> None:
        self._has_ended = True
        waiting, self._waiting = self._waiting, set()
        for relay in waiting:
            relay.resume()


def _later(scheduler: Scheduler, ms: int, done: Callable[[None], None]) -> None:
    scheduler.later(ms, lambda: done(None))
