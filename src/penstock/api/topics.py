"""Topics: the retry settings of one, and the report of its partitions and groups."""

from __future__ import annotations

import msgspec


class RetryDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A topic's retry settings, for messages without a policy of their own. None means "not given";
    0 means no limit on attempts, or the broker's backoff."""

    max_attempts: int | None = None
    retry_backoff_ms: int | None = None
    retry_max_backoff_ms: int | None = None


NO_RETRIES = RetryDefaults()


class PartitionReport(msgspec.Struct, frozen=True):
    partition: int
    first_offset: int
    next_offset: int
    retained_msgs: int
    retained_bytes: int
    buffered_msgs: int
    buffered_bytes: int


class ProgressReport(msgspec.Struct, frozen=True):
    """`lag` counts the messages that the group has not finished, in flight and waiting included."""

    partition: int
    last_acked: int
    next_offset: int
    in_flight: int
    unfinished: int
    lag: int


class GroupReport(msgspec.Struct, frozen=True):
    name: str
    consumers: int
    partitions: list[ProgressReport]


class TopicReport(msgspec.Struct, frozen=True):
    name: str
    next_offset: int
    retention_ms: int
    retention_bytes: int
    after_archive: bool
    max_attempts: int
    retry_backoff_ms: int
    retry_max_backoff_ms: int
    partitions: list[PartitionReport]
    groups: list[GroupReport]
