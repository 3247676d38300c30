"""The events that a subscription has not taken yet: a bounded buffer of runs of events.

Invariant: holds at most `depth` events and `max_bytes` bytes, except for a single event that is
larger. Never keeps an event of a batch after dropping an earlier one of the same batch. All buffers
share the payloads, and none keeps payloads alive that it does not hold. Must not know who reads it.
"""

from __future__ import annotations

from collections import deque

from penstock.api.streams import EventBatch, EventRun


class EventBuffer:
    __slots__ = ("_runs", "depth", "events", "max_bytes", "nbytes")

    def __init__(self, depth: int, max_bytes: int) -> None:
        self.depth = depth
        self.max_bytes = max_bytes
        self.events = 0
        self.nbytes = 0
        self._runs: deque[EventRun] = deque()

    def offer(self, run: EventRun) -> int:
        """Keeps the run, or as much of its beginning as fits. Returns the number of events kept."""
        count = run.end - run.start
        events = self.events + count
        nbytes = self.nbytes + run.nbytes
        if events > self.depth or nbytes > self.max_bytes:
            return self._offer_beginning(run)
        self.events = events
        self.nbytes = nbytes
        self._runs.append(run)
        return count

    def take(self, max_events: int) -> list[EventRun]:
        """Removes and returns the oldest events, in order. The last run may be split."""
        if self.events <= max_events:
            taken = list(self._runs)
            self.clear()
            return taken
        taken = []
        while max_events > 0:
            run = self._runs.popleft()
            if run.end - run.start > max_events:
                run, rest = _split(run, run.start + max_events)
                self._runs.appendleft(rest)
            taken.append(run)
            max_events -= run.end - run.start
            self.events -= run.end - run.start
            self.nbytes -= run.nbytes
        return taken

    def clear(self) -> None:
        self._runs.clear()
        self.events = self.nbytes = 0

    def is_down_to_half(self) -> bool:
        return self.events * 2 <= self.depth and self.nbytes * 2 <= self.max_bytes

    def _offer_beginning(self, run: EventRun) -> int:
        room = self.depth - self.events
        if room <= 0:
            return 0
        kept = _beginning(run, room, self.max_bytes - self.nbytes)
        if kept == 0 and not self.events:
            # An event that is larger than the whole buffer would otherwise never arrive.
            kept = 1
        if kept == run.end - run.start:
            self._runs.append(run)
            self.nbytes += run.nbytes
        elif kept:
            # A new batch, since the run's batch would keep the dropped events in memory.
            beginning = whole(run.batch.payloads[run.start : run.start + kept], run.offset)
            self._runs.append(beginning)
            self.nbytes += beginning.nbytes
        self.events += kept
        return kept


def whole(payloads: list[bytes], offset: int = -1) -> EventRun:
    """Returns a run of a new batch with all payloads."""
    batch = EventBatch(payloads, offset=offset)
    return EventRun(batch, 0, len(payloads), sum(map(len, payloads)))


def cut(
    payloads: list[bytes], nbytes: int, max_events: int, max_bytes: int, offset: int = -1
) -> list[EventRun]:
    """Cuts payloads into batches of at most `max_events` and `max_bytes`. A larger event is a batch
    by itself. `offset` is that of the first event, or -1."""
    count = len(payloads)
    if count <= max_events and nbytes <= max_bytes:
        return [EventRun(EventBatch(payloads, offset=offset), 0, count, nbytes)]
    runs = []
    rest = EventRun(EventBatch(payloads, offset=offset), 0, count, nbytes)
    while rest.start < count:
        end = rest.start + max(1, _beginning(rest, max_events, max_bytes))
        runs.append(whole(payloads[rest.start : end], rest.offset))
        rest = EventRun(rest.batch, end, count, rest.nbytes - runs[-1].nbytes)
    return runs


def _beginning(run: EventRun, max_events: int, max_bytes: int) -> int:
    """Returns how many of the run's first events are within both limits."""
    count = 0
    for index in range(run.start, min(run.end, run.start + max_events)):
        max_bytes -= len(run.batch.payloads[index])
        if max_bytes < 0:
            break
        count += 1
    return count


def _split(run: EventRun, at: int) -> tuple[EventRun, EventRun]:
    nbytes = sum(map(len, run.batch.payloads[run.start : at]))
    return (
        EventRun(run.batch, run.start, at, nbytes),
        EventRun(run.batch, at, run.end, run.nbytes - nbytes),
    )
