"""The backlog of a partition: how far its slowest group is behind, in O(log groups).

Owns the counters of stored, trimmed and buffered messages. Buffered is what the slowest group has
not finished; without groups, everything retained. Invariant: each group's finished counters only
grow, so their least value is kept in a heap that is corrected when it is read. The heap is a cache
and can be built again from the groups. Must not know offsets or message bodies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from penstock.core.groups import Progress

_Entry = tuple[int, int, Progress]


def _msgs(progress: Progress) -> int:
    return progress.finished_msgs


def _bytes(progress: Progress) -> int:
    return progress.finished_bytes


class _Least:
    """The smallest value of a growing measure over the partition's groups."""

    __slots__ = ("_heap", "_measure")

    def __init__(self, measure: Callable[[Progress], int]) -> None:
        self._measure = measure
        self._heap: list[_Entry] = []

    def add(self, progress: Progress) -> None:
        heapq.heappush(self._heap, (self._measure(progress), progress.group.id, progress))

    def remove(self, progress: Progress) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not progress]
        heapq.heapify(self._heap)

    def value(self) -> int | None:
        heap = self._heap
        while heap:
            known, group_id, progress = heap[0]
            actual = self._measure(progress)
            if actual == known:
                return known
            heapq.heapreplace(heap, (actual, group_id, progress))
        return None


class Backlog:
    """Counters of one partition: messages ever stored, trimmed, and finished by the slowest group.
    Without a group everything retained counts as unfinished, or nothing if it is a stream's."""

    __slots__ = (
        "_least_bytes",
        "_least_msgs",
        "is_stream",
        "safe_bytes",
        "safe_msgs",
        "stored_bytes",
        "stored_msgs",
        "trimmed_bytes",
        "trimmed_msgs",
    )

    def __init__(self) -> None:
        self.is_stream = False
        self.stored_msgs = 0
        self.stored_bytes = 0
        self.trimmed_msgs = 0
        self.trimmed_bytes = 0
        self._least_msgs = _Least(_msgs)
        self._least_bytes = _Least(_bytes)
        # Up to these totals of stored messages there was room at the last exact check. The buffered
        # amount grows no faster than the stored one, so it is computed again only beyond them.
        self.safe_msgs = 0
        self.safe_bytes = 0

    def admit(self, progress: Progress) -> None:
        """Adds a new group. It owes what is buffered now; older messages do not count for it."""
        owed_msgs, owed_bytes = self.buffered_msgs(), self.buffered_bytes()
        progress.finished_msgs = self.stored_msgs - owed_msgs
        progress.finished_bytes = self.stored_bytes - owed_bytes
        progress.free_msgs = self.retained_msgs() - owed_msgs
        progress.free_bytes = self.retained_bytes() - owed_bytes
        self.restore(progress)

    def restore(self, progress: Progress) -> None:
        """Adds a group with its counters from a snapshot."""
        self._least_msgs.add(progress)
        self._least_bytes.add(progress)

    def remove(self, progress: Progress) -> None:
        self._least_msgs.remove(progress)
        self._least_bytes.remove(progress)
        # The slowest group may be another one now, or there is none.
        self.safe_msgs = self.safe_bytes = 0

    def retained_msgs(self) -> int:
        return self.stored_msgs - self.trimmed_msgs

    def retained_bytes(self) -> int:
        return self.stored_bytes - self.trimmed_bytes

    def buffered_msgs(self) -> int:
        least = self._least_msgs.value()
        if least is None:
            return 0 if self.is_stream else self.retained_msgs()
        return self.stored_msgs - least

    def buffered_bytes(self) -> int:
        least = self._least_bytes.value()
        if least is None:
            return 0 if self.is_stream else self.retained_bytes()
        return self.stored_bytes - least
