"""Starts a sealing run when a segment is closed or somebody asks, and takes over its results.

Invariant: each request to read now what is only in the log is answered once: when all that was
durable at the request is sealed, or with the reason why it is not. All requests that wait share a
run. A run costs a process and a new segment, so after one the next must wait for several times its
duration.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from penstock.engine.clock import Clock
from penstock.engine.journal import SealedJournal
from penstock.engine.ledger import Then
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.scheduler import Cancellable, Scheduler
from penstock.engine.window import Window
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import MAX_FRESH_WAIT_MS, MIB
from penstock.storage.checkpoint import Checkpoint
from penstock.storage.data_directory import SealedFiles
from penstock.storage.frames import POSITION_BITS
from penstock.storage.history import remove_history
from penstock.storage.journal_files import remove_journal
from penstock.storage.log import Log
from penstock.storage.seal import Sealed
from penstock.storage.sealer import Sealer

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


MANY_REMOVED_BYTES = 8 * MIB
MANY_SEGMENTS = 4
PATIENT_NICE = 19
URGENT_NICE = 5
"""Sealing takes only idle time of the CPU until so many segments wait that a restart would be slow;
then it takes its share."""
MANY_RECORDS = 500_000
"""A run that sealed more records leaves free memory that is worth giving back."""
IDLE_ROUNDS = 60
MAX_REST_ROUNDS = 60
KEEPS_FAILING = 3
"""After so many failures in a row operators are told."""

_log = logging.getLogger("penstock.engine")


class Sealing:
    """Tells `window` and `journal` what a run has moved from the log into files. `disk` has the
    files that the checkpoint names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        window: Window,
        log: Log,
        disk: SealedFiles,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self.journal = SealedJournal(checkpoint.journal)
        self.next_seq = checkpoint.next_seq
        """The frame behind those that are sealed and synced."""
        self.runs = 0
        self._removed_bytes = 0
        self._idle_rounds = 0
        self.failures = 0
        """Runs that failed since the last that succeeded."""
        self.last_failure_ms = 0
        self._rest_rounds = 0
        self._began_ms = 0
        self._log = log
        self._window = window
        self._clock = clock
        self._scheduler = scheduler
        self._disk = disk
        self._files = set(checkpoint.files)
        self._sealer = Sealer(
            disk.path,
            checkpoint.state.limits,
            scheduler.post,
            self._sealed,
            self._failed,
            disk.vfs.identity(disk.path),
        )
        self.requests = SealRequests(log, clock, scheduler, self)

    @property
    def is_running(self) -> bool:
        return self._sealer.is_running

    @property
    def warning(self) -> str:
        """The message for operators, without details that belong in the log; empty if all is
        well."""
        if self.failures < KEEPS_FAILING:
            return ""
        return (
            f"sealing the log has failed {self.failures} times in a row: the log grows until it "
            "succeeds; the broker's log says why"
        )

    def run(self) -> None:
        """Starts a run if there is something to seal and none is under way."""
        closed = self._log.closed_segments()
        if closed and not self.is_running and not self._rest_rounds:
            is_urgent = len(closed) >= MANY_SEGMENTS or self.requests.is_wanted
            nice = URGENT_NICE if is_urgent else PATIENT_NICE
            self._began_ms = self._clock.now_ms()
            self._sealer.start(closed[-1][0], self._files, nice, self.journal.files)

    def note_removed(self, nbytes: int) -> None:
        """Notes that messages were removed whose bytes should be removed from disk too."""
        self._removed_bytes += nbytes

    def housekeep(self) -> None:
        """Called once a second. Starts a run that removes bytes from disk: at once if they are
        many, otherwise after some time."""
        self.requests.housekeep()
        self._idle_rounds += 1
        self._rest_rounds = max(0, self._rest_rounds - 1)
        is_due = self._removed_bytes >= MANY_REMOVED_BYTES or self._idle_rounds >= IDLE_ROUNDS
        if self._removed_bytes and is_due and not self.is_running:
            self._removed_bytes = 0
            self._log.roll()
        self.run()

    def log_failed(self, failure: PenstockError) -> None:
        self.requests.give_up(failure)

    def stop(self) -> None:
        self.requests.stop()
        self._sealer.close()

    def _sealed(self, result: Sealed) -> None:
        self.runs += 1
        self.next_seq = result.next_seq
        self._idle_rounds = 0
        if self.failures:
            _log.info("sealing works again, after %d failures in a row", self.failures)
        self.failures = 0
        self._window.seal(result.added, set(result.dropped))
        self.journal.sealed(result)
        self._log.drop_segments(result.first_segment - 1)
        self._files.update(result.added_files)
        self._files.difference_update(result.dropped)
        if result.dropped or result.journal_dropped:
            self._remove(result.dropped, result.journal_dropped)
        for text in result.damaged:
            _log.error("a history file is damaged: %s", text)
        _log.info(
            "sealed %d records in %.1f s; the log begins at segment %d",
            result.records,
            result.seconds,
            result.first_segment,
        )
        self.requests.run_ended(self._clock.now_ms() - self._began_ms)
        if result.records >= MANY_RECORDS:
            self._scheduler.in_thread(trim_memory)

    def _remove(self, files: list[int], journal_files: list[int]) -> None:
        for file in files:
            self._disk.history.forget(file)
        disk = self._disk

        def remove() -> None:
            remove_history(disk.vfs, disk.path, files)
            remove_journal(disk.vfs, disk.path, journal_files)

        self._scheduler.in_thread(remove)

    def _failed(self, text: str) -> None:
        """Logs the first failure, and once more when failures go on."""
        self.failures += 1
        self.last_failure_ms = self._clock.now_ms()
        self._rest_rounds = min(2 ** min(self.failures, 10), MAX_REST_ROUNDS)
        if self.failures == 1:
            _log.warning(
                "sealing the log failed and is tried again in %d s: %s", self._rest_rounds, text
            )
        elif self.failures == KEEPS_FAILING:
            _log.error(
                "sealing the log keeps failing, and the log grows until it succeeds. It is tried "
                "again, at least every %d s; nothing more is logged until it works. Now: %s",
                MAX_REST_ROUNDS,
                text,
            )
        self.requests.give_up(Unavailable("the log could not be sealed; try again later"))
