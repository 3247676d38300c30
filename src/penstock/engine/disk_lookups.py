"""Look-ups that may have to read from disk: prepared on the loop, done on a thread.

Invariant: what was looked up may be sealed or rewritten before it is read; then it is looked up
again, and the caller does not notice. Threads are those that consumers' pages do not need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from penstock.engine.ledger import Ledger
from penstock.engine.reading import MOVED, log_unreadable
from penstock.engine.scheduler import Scheduler
from penstock.model.errors import PenstockError

T = TypeVar("T")


class DiskLookups:
    def __init__(self, ledger: Ledger, scheduler: Scheduler) -> None:
        self._ledger = ledger
        self._scheduler = scheduler

    def run(
        self, look: Callable[[], Callable[[], T]], found: Callable[[T | PenstockError], None]
    ) -> None:
        """Calls `look` on the loop, which returns the work for a thread or raises. Then tells
        `found` the outcome, on the loop."""
        try:
            work = look()
        except PenstockError as error:
            found(error)
        else:
            self._scheduler.in_background(partial(self._work, look, work, found))

    def _work(
        self,
        look: Callable[[], Callable[[], T]],
        work: Callable[[], T],
        found: Callable[[T | PenstockError], None],
    ) -> None:
        """Runs on a thread."""
        outcome: T | PenstockError
        try:
            outcome = work()
        except MOVED:
            self._scheduler.post(partial(self._again, look, found))
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, the caller waits
            outcome = log_unreadable(error, "the partition")
        self._scheduler.post(partial(found, outcome))

    def _again(
        self, look: Callable[[], Callable[[], T]], found: Callable[[T | PenstockError], None]
    ) -> None:
        """Looks again when the log is durable: a message evicted in the turn that stored it can be
        read then."""

        def when_durable(failure: PenstockError | None) -> None:
            if failure is None:
                self.run(look, found)
            else:
                found(failure)

        self._ledger.when_durable(when_durable)
