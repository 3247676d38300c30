"""Evicts messages that every group has finished, except for the newest `tail_bytes`.

Invariant: in memory beyond the tail is only what some group has not finished. So a broker without
a backlog is small, whatever `memory_bytes` allow. Evicted messages can be read back, from the log
until they are sealed and from history then; not to be used without a disk. Partitions are looked
at in turn, a bounded number at a time, and never for a single message.
"""

from __future__ import annotations

from penstock.core.state import BrokerState
from penstock.engine.allocator import give_back
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Window
from penstock.model.limits import MIB

LOOK_PARTITIONS = 1000
LOOK_ENTRIES = 50_000
"""Partitions, and unfinished entries of their groups, looked at in one go: at most a few
milliseconds of the loop. The next look goes on with the other partitions."""
LOOK_BYTES = 4 * MIB
"""Added since the last look: it is worth another one, without waiting for the second to end."""
TAIL_SHARE = 8
"""The tail is at most this part of `memory_bytes`: under pressure finished messages go first."""
GIVE_BACK_BYTES = 32 * MIB
"""Less memory in use than there was: the allocator is asked to give back what it keeps."""


class Tail:
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
        """Once a turn; looks only if much was added."""
        if self._window.added_bytes - self._looked_at >= self._look_bytes:
            self.look()

    def look(self) -> None:
        """Once a second, and when much was added."""
        window = self._window
        self._looked_at = window.added_bytes
        self._peak_bytes = max(self._peak_bytes, window.used_bytes)
        self._evict(window.added_bytes - self._tail_bytes)
        if window.used_bytes < self._peak_bytes - GIVE_BACK_BYTES:
            self._peak_bytes = window.used_bytes
            self._scheduler.in_thread(give_back)

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
