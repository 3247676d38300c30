"""Work that the broker does by itself: lease ends, retries, dead letters, retention, eviction,
sealing.

It runs whether or not a consumer is connected. Each kind of work is done in bursts, so that a mass
of it never holds up the loop.
"""

from __future__ import annotations

from penstock.core.groups import DYING, IN_FLIGHT, Unfinished
from penstock.core.settle import decide_lapse
from penstock.core.state import forget_expired_effects
from penstock.engine.eviction import Eviction
from penstock.engine.leases import is_unfinished
from penstock.engine.scheduler import Cancellable
from penstock.engine.wiring import Parts
from penstock.model.errors import Unavailable

HOUSEKEEPING_MS = 1000
NO_ROOM_RETRY_MS = 250
BURST = 1000


class Maintenance:
    """The `LedgerListener` of the engine's ledger."""

    def __init__(self, parts: Parts) -> None:
        self.eviction = Eviction(parts.state, parts.window, parts.scheduler)
        self.sealing = parts.sealing
        self.lapses = 0
        self._parts = parts
        self._state = parts.state
        self._ledger = parts.ledger
        self._leases = parts.leases
        self._scheduler = parts.scheduler
        self._alarm: Cancellable | None = None
        self._alarm_ms = 0
        self._housekeeping: Cancellable | None = None
        # Entries whose lease has ended, recorded a burst a turn.
        self._lapsed: list[Unfinished] = []

    def start(self) -> None:
        """Ends the leases of all that was in flight before the start, or gives them again where
        another broker served before. Goes on with dead letters."""
        self._lapsed += self._leases.restore(
            self._state, self._ledger.now_ms(), renews=self._parts.log.is_shared
        )
        for group in self._state.groups.values():
            for entry in group.unfinished():
                if entry.state == DYING:
                    self._parts.dead_letters.add(entry)
        self._housekeep()
        self._ledger.wake()

    def stop(self) -> None:
        for timer in (self._alarm, self._housekeeping):
            if timer is not None:
                timer.cancel()
        if self.sealing is not None:
            self.sealing.stop()
        self._parts.scheduler.close()

    def note_removed(self, nbytes: int) -> None:
        if self.sealing is not None:
            self.sealing.note_removed(nbytes)

    # -- each turn ----------------------------------------------------------------------------

    def turn(self) -> None:
        if self._lapsed:
            self._lapse()
        if self._parts.dead_letters:
            self._parts.dead_letters.run()
        self._parts.writes.batches.turn()
        self._parts.dispatcher.dispatch()
        if self.sealing is not None:
            self.eviction.turn()
            if self._parts.window.is_over():
                self._parts.window.evict()
        self._arm()

    def released(self) -> None:
        """Sets the alarm: leases begin when their items leave."""
        self._arm()

    def rolled(self) -> None:
        if self.sealing is not None:
            self.sealing.run()

    def failed(self, failure: Unavailable) -> None:
        self._parts.dispatcher.end_all(failure.message)
        self._parts.caches.log_failed(failure)
        self._parts.writes.log_failed(failure)
        if self.sealing is not None:
            self.sealing.log_failed(failure)

    def _arm(self) -> None:
        when_ms = self._leases.next_ms()
        if when_ms is None or (self._alarm is not None and self._alarm_ms <= when_ms):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = when_ms
        delay_ms = max(0, when_ms - self._ledger.now_ms())
        self._alarm = self._scheduler.later(delay_ms, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        try:
            for entry in self._leases.ended(self._ledger.now_ms()):
                if entry.state == IN_FLIGHT:
                    self._lapsed.append(entry)
                else:
                    self._parts.dispatcher.mark(entry.progress)
        except BaseException as error:
            raise self._ledger.stop_serving(error, is_appended=True) from error
        self._ledger.wake()

    def _lapse(self) -> None:
        lapsed, self._lapsed = self._lapsed[:BURST], self._lapsed[BURST:]
        now_ms = self._ledger.now_ms()
        for entry in lapsed:
            # It may have been settled, extended or delivered again since.
            is_leased = entry.state == IN_FLIGHT and is_unfinished(entry)
            if is_leased and 0 < self._leases.end_of(entry) <= now_ms:
                self._end_lease(entry, now_ms)
        if self._lapsed:
            self._ledger.wake()

    def _end_lease(self, entry: Unfinished, now_ms: int) -> None:
        dispatcher = self._parts.dispatcher
        if dispatcher.is_unwritten(entry):
            # It never left since the connection is full: another consumer gets it, uncounted.
            dispatcher.give_back([entry])
            if entry.state == IN_FLIGHT:
                self._leases.extend(entry, now_ms + NO_ROOM_RETRY_MS)
            return
        if not self._ledger.record(decide_lapse(entry, self._leases.end_of(entry), now_ms)):
            self._leases.extend(entry, now_ms + NO_ROOM_RETRY_MS)
            return
        self.lapses += 1
        dispatcher.left_flight(entry)
        if entry.state == DYING:
            self._parts.dead_letters.add(entry)

    # -- once a second -------------------------------------------------------------------------

    def _housekeep(self) -> None:
        self._housekeeping = self._scheduler.later(HOUSEKEEPING_MS, self._housekeep)
        if self._ledger.failure is not None:
            return
        self._parts.log.check_space()
        self._parts.dispatcher.try_again()
        now_ms = self._ledger.now_ms()
        self._state.produced.forget_expired(now_ms)
        self._state.transactions.forget_expired(now_ms)
        self._parts.writes.staging.housekeep(now_ms)
        for topic in self._state.topics.values():
            forget_expired_effects(topic, now_ms)
        if self.sealing is None or not self.sealing.is_running:
            self.note_removed(self._parts.retention.run(now_ms))
        if self.sealing is not None:
            self.sealing.housekeep()
            self.eviction.look()
        if self._parts.dead_letters:
            self._ledger.wake()
