"""Topics and their partitions: names, offsets, settings, counters and backlog.

Invariants: offsets count up across the partitions of a topic. Each group's finished counters only
grow, so the least of them, which ends the backlog, is kept in a heap that is corrected when it is
read. The heap is a cache and can be built again from the groups. Must not know message bodies,
which are in the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from penstock.core.effects import Effects, EffectTotals
from penstock.core.groups import Group, Progress
from penstock.core.publishers import Publishers
from penstock.model.audit import AUDIT_TOPIC
from penstock.model.names import is_dead_letter_topic
from penstock.model.scopes import Scope, is_stream_log, split_name

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


class Partition:
    """`first_offset` is the oldest retained offset; `end_offset` is one past the newest."""

    __slots__ = ("backlog", "end_offset", "first_offset", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.first_offset = 0
        self.end_offset = 0
        self.backlog = Backlog()


class Topic:
    """Offsets count up across the partitions, so that (topic, offset) identifies a message."""

    __slots__ = (
        "after_archive",
        "created_ms",
        "effects",
        "groups",
        "id",
        "is_dead_letter",
        "is_reserved",
        "max_attempts",
        "name",
        "next_offset",
        "partitions",
        "publishers",
        "retention_bytes",
        "retention_ms",
        "retry_backoff_ms",
        "retry_max_backoff_ms",
        "scope",
    )

    def __init__(
        self, topic_id: int, name: str, partitions: int, created_ms: int, totals: EffectTotals
    ) -> None:
        self.id = topic_id
        self.name = name
        self.scope = split_name(name)[0]
        self.created_ms = created_ms
        self.partitions = [Partition(index) for index in range(partitions)]
        self.next_offset = 0
        self.groups: dict[str, Group] = {}
        self.effects = Effects(totals)
        self.publishers = Publishers()
        self.retention_ms = 0
        self.retention_bytes = 0
        self.after_archive = False
        # For messages without a policy. 0 means no limit, or the broker's backoff.
        self.max_attempts = 0
        self.retry_backoff_ms = 0
        self.retry_max_backoff_ms = 0
        self.is_dead_letter = is_dead_letter_topic(name)
        self.is_reserved = name == AUDIT_TOPIC
        if is_stream_log(name):
            for partition in self.partitions:
                partition.backlog.is_stream = True


class TopicTable(dict[str, Topic]):
    """Topics by full name, and by the tenant or namespace that they belong to: whoever counts what
    one of them has must not look at the topics of all others."""

    __slots__ = ("_by_scope", "_plain")

    def __init__(self) -> None:
        super().__init__()
        self._by_scope: dict[Scope, dict[str, Topic]] = {}
        self._plain: dict[Scope, int] = {}

    def __setitem__(self, name: str, topic: Topic) -> None:
        self.pop(name, None)
        super().__setitem__(name, topic)
        for scope in _around(topic.scope):
            self._by_scope.setdefault(scope, {})[name] = topic
            self._plain[scope] = self._plain.get(scope, 0) + (not is_stream_log(name))

    def __delitem__(self, name: str) -> None:
        self._leave(name, self[name])
        super().__delitem__(name)

    def pop(self, name: str, default: None = None) -> Topic | None:  # type: ignore[override]
        topic = self.get(name, default)
        if topic is not None:
            del self[name]
        return topic

    def within(self, scope: Scope) -> Iterable[Topic]:
        """Returns the topics of a namespace, or of a tenant if the namespace is empty. The logs of
        streams are among them."""
        return self._by_scope.get(scope, _NO_TOPICS).values()

    def plain_count(self, scope: Scope) -> int:
        """Returns how many of them are no logs of streams."""
        return self._plain.get(scope, 0)

    def _leave(self, name: str, topic: Topic) -> None:
        for scope in _around(topic.scope):
            topics = self._by_scope[scope]
            del topics[name]
            self._plain[scope] -= not is_stream_log(name)
            if not topics:
                del self._by_scope[scope], self._plain[scope]


_NO_TOPICS: dict[str, Topic] = {}


def _around(scope: Scope) -> tuple[Scope, Scope]:
    return scope, (scope[0], "")
