"""Evicts messages that every group has finished, except for the newest `tail_bytes`.

Invariant: beyond those, memory holds only what some group has not finished. So a broker without a
backlog is small, whatever `memory_bytes` allows. Evicted messages can be read back, from the log
until they are sealed and from history then; not to be used without a disk. Partitions are visited
in turn, a bounded number at a time, and never for a single message.
"""

from __future__ import annotations

from penstock.core.state import BrokerState
from penstock.engine.memory_trimming import trim_memory
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Window
from penstock.model.limits import MIB

LOOK_PARTITIONS = 1000
LOOK_ENTRIES = 50_000
"""The partitions, and the unfinished entries of their groups, that one round visits: at most a few
milliseconds of the loop. The next round goes on with the other partitions."""
LOOK_BYTES = 4 * MIB
"""After this many added bytes the next round begins at once, before its second is over."""
TAIL_SHARE = 8
"""`tail_bytes` is at most this part of `memory_bytes`: under pressure finished messages go first.
"""
GIVE_BACK_BYTES = 32 * MIB
"""The bytes by which memory in use must shrink before the allocator is asked to give free pages
back."""


class Eviction:
    def __init__(self, state: BrokerState, window: Window, scheduler: Scheduler) -> None:
        limits = state.limits
        self._state = state
        self._window = window
        self._scheduler = scheduler
        self._tail_bytes = min(limits.tail_bytes, limits.memory_bytes // TAIL_SHARE)
        self._look_bytes = min(LOOK_BYTES, max(1, self._tail_bytes))
        self._looked_at = 0
        self._peak_bytes = 0

    def turn(self) -> None:
        """Called once a turn; starts a round only if much was added."""
        if self._window.added_bytes - self._looked_at >= self._look_bytes:
            self.look()

    def look(self) -> None:
        """Evicts in one round. Called once a second, and when much was added."""
        window = self._window
        self._looked_at = window.added_bytes
        self._peak_bytes = max(self._peak_bytes, window.used_bytes)
        self._evict(window.added_bytes - self._tail_bytes)
        if window.used_bytes < self._peak_bytes - GIVE_BACK_BYTES:
            self._peak_bytes = window.used_bytes
            self._scheduler.in_thread(trim_memory)

    def _evict(self, added_end: int) -> None:
        window, entries = self._window, 0
        for _ in range(min(LOOK_PARTITIONS, window.resident_partitions)):
            log = window.next_resident()
            if log.oldest_resident().added_end > added_end:
                continue
            topic = self._state.topics_by_id[log.topic_id]
            floor = topic.partitions[log.partition].end_offset
            for group in topic.groups.values():
                progress = group.progress[log.partition]
                floor = min(floor, progress.floor())
                entries += len(progress.unfinished)
            window.evict_finished(log, floor, added_end)
            if entries > LOOK_ENTRIES:
                return
