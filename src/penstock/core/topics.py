"""Topics and their partitions: names, offsets, settings and counters.

Invariant: offsets count up across the partitions of a topic. Must not know message bodies, which
are in the log.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.backlog import Backlog
from penstock.core.effects import Effects, EffectTotals
from penstock.core.groups import Group
from penstock.core.publishers import Publishers
from penstock.model.audit import AUDIT_TOPIC
from penstock.model.names import is_dead_letter_topic
from penstock.model.scopes import Scope, is_stream_log, split_name


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
