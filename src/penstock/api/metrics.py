"""Metrics: a snapshot of the counters and sizes that an engine keeps."""

from __future__ import annotations

import msgspec

from penstock.api.quotas import QuotaReport
from penstock.api.topics import TopicReport
from penstock.model.tenancy import Path


class HistogramCounts(msgspec.Struct, frozen=True):
    """`counts` has one observation count for each bound, and one for everything above the last.
    `total` is the sum of all observations."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float


class StreamCounts(msgspec.Struct):
    """Counts of a stream since the broker started, in events unless the name says otherwise.
    `lagging` and `subscribers` are current."""

    published: int = 0
    delivered: int = 0
    dropped: int = 0
    refused_publishes: int = 0
    lag_alerts: int = 0
    slow_disconnects: int = 0
    lagging: int = 0
    subscribers: int = 0


class StreamMetrics(msgspec.Struct, frozen=True):
    """`queued` counts events, `waiting` publishes."""

    path: Path
    counts: StreamCounts
    queued: int
    waiting: int


class NamedSubscriptionMetrics(msgspec.Struct, frozen=True):
    """`lag` counts the events that the subscription has not finished, `unacked` those of them that
    were delivered."""

    path: Path
    name: str
    lag: int
    unacked: int


class CacheMetrics(msgspec.Struct, frozen=True):
    path: Path
    hits: int
    misses: int
    evictions: int
    expirations: int
    entries: int
    bytes: int


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` and `caches` are those that have been used. `last_sealing_failure_ms` is 0 if
    sealing never failed. `clock_ahead_ms` is negative while broker time is behind the machine's."""

    topics: dict[str, TopicReport]
    """The figures by full name."""
    dead_letters: dict[tuple[str, str, int], int]
    """Messages moved to a dead-letter topic, by full name of the topic, group and partition."""
    rejected: dict[tuple[str, str, str], int]
    """Produces refused, by full name of the topic, partition and reason."""
    deliveries: int
    redeliveries: int
    lease_lapses: int
    router_failures: int

    log_commits: int
    log_bytes: int
    has_log_failed: bool
    sealing_failures: int
    last_sealing_failure_ms: int
    memory_bytes: int
    page_reads: int
    clock_ahead_ms: int
    idempotency_keys: int

    commit_seconds: HistogramCounts
    answer_seconds: HistogramCounts
    delivery_seconds: HistogramCounts

    streams: list[StreamMetrics]
    named_subscriptions: list[NamedSubscriptionMetrics]
    """All that exist, as for the groups of topics."""
    caches: list[CacheMetrics]
    cache_watches: int
    quotas: list[QuotaReport]
    """Quotas of the tenants and namespaces that have one."""

    staged_bytes: int
    staged_pieces: int
    storing_batches: int
    written_rows: int
    skipped_rows: int
