"""Quotas: limits on what a tenant, or one namespace of it, may use."""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a tenant or a namespace. 0 means no limit.

    `publish_rate_limit` counts messages and events per second, `publish_bytes_limit` their bytes.
    `subscribe_connections` counts open subscriptions, consumers and watches, `connections` open
    connections. `cache_memory` is in bytes. `backlog_msgs` and `backlog_bytes` count messages that
    some group has not finished. `disk_bytes` counts all messages and events that are kept, durable
    caches and staged rows. `stream_retention` is the longest retention of a topic or stream, in
    milliseconds. `idempotency_keys` counts keys of produces that are remembered. `groups` counts
    groups of topics and named subscriptions of streams; `streams` and `caches` count those.
    """

    publish_rate_limit: int = 0
    publish_bytes_limit: int = 0
    subscribe_connections: int = 0
    topics: int = 0
    cache_memory: int = 0
    backlog_msgs: int = 0
    backlog_bytes: int = 0
    disk_bytes: int = 0
    stream_retention: int = 0
    connections: int = 0
    idempotency_keys: int = 0
    groups: int = 0
    streams: int = 0
    caches: int = 0


NO_QUOTA = Quota()
