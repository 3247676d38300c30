"""Leases and retry alarms: what only the serving process knows of unfinished messages.

All of it is volatile: no record and no image has it, a standby has none of it, and a start builds
it anew from the state (`restore`). Invariant: an unfinished entry that is IN_FLIGHT or WAITING has
exactly one lease or alarm here; a READY or DYING one has none. Must not change the state.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter

import msgspec

from penstock.core.groups import IN_FLIGHT, WAITING, Progress, Unfinished
from penstock.core.state import BrokerState

TICK_MS = 10
MOST_STALE = 1000
"""Ticks of buckets that are gone, which may wait in the heap however few buckets there are."""
NO_TICK = -1
NO_CONSUMER = 0


class DeliveryLease(msgspec.Struct, gc=False, eq=False):
    """The lease of a delivery, or the alarm of a retry, which has no consumer.

    `until` is when it ends; for an alarm that has rung, when it rang. A lease begins when its item
    leaves: before, `until` is 0 and no timer is set.
    """

    entry: Unfinished
    consumer: int = NO_CONSUMER
    until: int = 0
    tick: int = NO_TICK


class Timers:
    """Ends of leases in buckets of `TICK_MS`: setting and clearing one is O(1), however many.

    Invariant: a lease is in at most one bucket, the one that its `tick` names. None fires before
    its time, nor later than one tick after it.
    """

    __slots__ = ("_buckets", "_ticks")

    def __init__(self) -> None:
        self._buckets: dict[int, set[DeliveryLease]] = {}
        self._ticks: list[int] = []

    def set(self, lease: DeliveryLease, when_ms: int) -> None:
        """Fires `lease` at `when_ms`; replaces the time it had."""
        tick = -(-when_ms // TICK_MS)
        if lease.tick == tick:
            return
        self.clear(lease)
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = set()
            heapq.heappush(self._ticks, tick)
            if len(self._ticks) > 2 * len(self._buckets) + MOST_STALE:
                self._ticks = list(self._buckets)
                heapq.heapify(self._ticks)
        bucket.add(lease)
        lease.tick = tick

    def clear(self, lease: DeliveryLease) -> None:
        if lease.tick != NO_TICK:
            bucket = self._buckets[lease.tick]
            bucket.discard(lease)
            if not bucket:
                # Its tick stays in the heap until it comes up, or too many have gathered.
                del self._buckets[lease.tick]
            lease.tick = NO_TICK

    def next_ms(self) -> int | None:
        """Returns the time of the earliest bucket; None with nothing set."""
        while self._ticks and self._ticks[0] not in self._buckets:
            heapq.heappop(self._ticks)
        return self._ticks[0] * TICK_MS if self._ticks else None

    def due(self, now_ms: int) -> list[DeliveryLease]:
        """Takes out and returns all leases whose time has come, oldest first."""
        fired: list[DeliveryLease] = []
        while self._ticks and self._ticks[0] * TICK_MS <= now_ms:
            bucket = self._buckets.pop(heapq.heappop(self._ticks), set())
            for lease in bucket:
                lease.tick = NO_TICK
            fired.extend(sorted(bucket, key=_offset_of))
        return fired


class Leases:
    def __init__(self) -> None:
        self._timers = Timers()
        self._of: dict[Unfinished, DeliveryLease] = {}
        # Alarms of WAITING entries that have rung, by offset: these may be delivered again.
        self._due: dict[Progress, dict[int, DeliveryLease]] = {}

    def restore(self, state: BrokerState, now_ms: int, *, renews: bool = False) -> list[Unfinished]:
        """Builds leases and alarms from the state, at a start. Returns the entries in flight whose
        leases end at once: with `renews` only those whose length is not known, the others begin
        again in full. A broker that takes over does that, since their consumers may live on."""
        ended: list[Unfinished] = []
        for group in state.groups.values():
            for entry in group.unfinished():
                if entry.state != IN_FLIGHT:
                    self.settle(entry)
                elif renews and entry.lease_ms:
                    self._of[entry] = DeliveryLease(entry)
                    self.extend(entry, now_ms + entry.lease_ms)
                else:
                    self._of[entry] = DeliveryLease(entry, until=now_ms)
                    ended.append(entry)
        return ended

    def give(self, entry: Unfinished, consumer: int) -> None:
        """Notes that the entry was delivered to this consumer. Its lease begins later, with
        `extend`."""
        if entry in self._of:
            self._forget(entry)
        self._of[entry] = DeliveryLease(entry, consumer)

    def extend(self, entry: Unfinished, until: int) -> None:
        """Begins the lease of an entry in flight, or moves its end."""
        lease = self._of[entry]
        lease.until = until
        self._timers.set(lease, until)

    def settle(self, entry: Unfinished) -> int:
        """Ends the lease or alarm of an entry that a record changed or finished. If it is WAITING
        now, an alarm is set. Returns the consumer that had it, or NO_CONSUMER."""
        consumer = self._forget(entry)
        if entry.state == WAITING and is_unfinished(entry):
            alarm = self._of[entry] = DeliveryLease(entry, until=entry.retry_at)
            self._timers.set(alarm, entry.retry_at)
        return consumer

    def drop(self, entries: Iterable[Unfinished]) -> None:
        """Forgets these entries, because their group is gone."""
        for entry in entries:
            self._forget(entry)

    def consumer_of(self, entry: Unfinished) -> int:
        lease = self._of.get(entry)
        return NO_CONSUMER if lease is None else lease.consumer

    def end_of(self, entry: Unfinished) -> int:
        """Returns when the lease of this entry in flight ends; 0 if it has not begun."""
        return self._of[entry].until

    def ready(self, progress: Progress, most: int) -> list[Unfinished]:
        """Returns up to `most` entries that may be delivered again: what was returned first, then
        the retries in the order in which they became ready."""
        due = self._due.get(progress)
        if due is None:
            return list(islice(progress.ready.values(), most)) if progress.ready else []
        at_once = ((entry.retry_at, entry) for entry in progress.ready.values())
        later = ((alarm.until, alarm.entry) for alarm in due.values())
        return [entry for _, entry in islice(heapq.merge(at_once, later, key=itemgetter(0)), most)]

    def next_ms(self) -> int | None:
        """Returns when `ended` will have something to return; None with nothing set."""
        return self._timers.next_ms()

    def ended(self, now_ms: int) -> list[Unfinished]:
        """Takes out the entries whose time has come, oldest first. The waiting ones among them are
        `ready` from now on."""
        fired: list[Unfinished] = []
        for lease in self._timers.due(now_ms):
            entry = lease.entry
            if entry.state == WAITING:
                lease.until = now_ms
                self._due.setdefault(entry.progress, {})[entry.offset] = lease
            fired.append(entry)
        return fired

    def _forget(self, entry: Unfinished) -> int:
        lease = self._of.pop(entry, None)
        if lease is None:
            return NO_CONSUMER
        self._timers.clear(lease)
        if self._due:
            due = self._due.get(entry.progress)
            if due is not None and due.pop(entry.offset, None) is not None and not due:
                del self._due[entry.progress]
        return lease.consumer


def is_unfinished(entry: Unfinished) -> bool:
    """False for an entry that was finished, or whose group is gone."""
    return entry.progress.unfinished.get(entry.offset) is entry


def _offset_of(lease: DeliveryLease) -> int:
    return lease.entry.offset
