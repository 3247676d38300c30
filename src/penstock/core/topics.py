"""Topics and their partitions: names, offsets, settings and counters.

Invariant: offsets count up across the partitions of a topic. Must not know message bodies, which
are in the log.
"""

from __future__ import annotations

from penstock.core.backlog import Backlog
from penstock.core.effects import Effects, EffectTotals
from penstock.core.groups import Group
from penstock.core.publishers import Publishers
from penstock.model.audit import AUDIT_TOPIC
from penstock.model.names import is_dead_letter_topic
from penstock.model.scopes import is_stream_log, split_name


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
