"""Timers for lease ends and retry times, in O(1) per change however many there are.

Invariant: an entry is in at most one bucket, the one its `tick` names. A bucket covers TICK_MS.
Nothing fires before its time, nor more than one tick after it. Must not know what a timer is for.
"""

from __future__ import annotations

import heapq

from penstock.core.groups import NO_TICK, Unfinished

TICK_MS = 10
MOST_STALE = 1000
"""Ticks of removed buckets that the heap may hold, even if there are few buckets."""


class Timers:
    __slots__ = ("_buckets", "_ticks")

    def __init__(self) -> None:
        self._buckets: dict[int, set[Unfinished]] = {}
        self._ticks: list[int] = []

    def set(self, entry: Unfinished, when_ms: int) -> None:
        """Makes `entry` due at `when_ms`. Replaces its earlier time."""
        tick = -(-when_ms // TICK_MS)
        if entry.tick == tick:
            return
        self.clear(entry)
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = set()
            heapq.heappush(self._ticks, tick)
            if len(self._ticks) > 2 * len(self._buckets) + MOST_STALE:
                self._ticks = list(self._buckets)
                heapq.heapify(self._ticks)
        bucket.add(entry)
        entry.tick = tick

    def clear(self, entry: Unfinished) -> None:
        if entry.tick != NO_TICK:
            bucket = self._buckets[entry.tick]
            bucket.discard(entry)
            if not bucket:
                # Its tick stays in the heap until it comes up or the heap is built again.
                del self._buckets[entry.tick]
            entry.tick = NO_TICK

    def next_ms(self) -> int | None:
        """Returns when the earliest bucket is due, or None if there is none."""
        while self._ticks and self._ticks[0] not in self._buckets:
            heapq.heappop(self._ticks)
        return self._ticks[0] * TICK_MS if self._ticks else None

    def due(self, now_ms: int) -> list[Unfinished]:
        """Removes and returns all entries that are due, oldest first."""
        fired: list[Unfinished] = []
        while self._ticks and self._ticks[0] * TICK_MS <= now_ms:
            bucket = self._buckets.pop(heapq.heappop(self._ticks), set())
            for entry in bucket:
                entry.tick = NO_TICK
            fired.extend(sorted(bucket, key=_by_offset))
        return fired


def _by_offset(entry: Unfinished) -> int:
    return entry.offset
