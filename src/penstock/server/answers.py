"""The shapes of answers that are plain mappings where they are sent, for the documentation.

Must not hold behaviour; a test compares them with what the broker answers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.streams import Lag

# -- streams and the registry ----------------------------------------------------------------------


class Event(msgspec.Struct):
    """A line, or a frame, of a subscription."""

    type: Literal["event"]
    subscription_id: str
    payload: bytes


class EventBatch(msgspec.Struct):
    type: Literal["event_batch"]
    subscription_id: str
    payloads: list[bytes]


class Subscriptions(msgspec.Struct):
    subscriptions: list[Lag]


class TenantAnswer(msgspec.Struct):
    """`revision` is the registry's at the entry's last change."""

    tenant_id: str
    created_ms: int
    revision: int


class NamespaceAnswer(msgspec.Struct):
    tenant_id: str
    namespace: str
    created_ms: int
    revision: int


class StreamAnswer(msgspec.Struct, kw_only=True):
    """The settings in force; `origins` says of each whether it is the stream's own or the
    broker's. `subscribers` only where one stream was asked for."""

    name: str
    tenant_id: str
    namespace: str
    delivery: str
    durable: bool
    ordering: str
    retention: str | None
    retention_ms: int
    event_queue_depth: int
    event_queue_bytes: int
    pub_queue_depth: int
    publish_queue_wait_timeout_ms: int
    lag_alert_events: int
    disconnect_slow_ms: int
    pub_workers_per_conn: int
    origins: dict[str, str]
    created_ms: int
    revision: int
    subscribers: int | None = None


class CacheAnswer(msgspec.Struct, kw_only=True):
    """The settings in force; a limit of null is none of its own. `entries` and `bytes` only where
    one cache was asked for."""

    name: str
    tenant_id: str
    namespace: str
    durable: bool
    consistency: str
    ttl_precision: str
    max_entries: int | None
    max_bytes: int | None
    eviction_policy: str
    cache_memory_bytes: int
    origins: dict[str, str]
    created_ms: int
    revision: int
    entries: int | None = None
    bytes: int | None = None


class TenantList(msgspec.Struct):
    tenants: list[TenantAnswer]


class NamespaceList(msgspec.Struct):
    namespaces: list[NamespaceAnswer]


class StreamList(msgspec.Struct):
    streams: list[StreamAnswer]


class CacheList(msgspec.Struct):
    caches: list[CacheAnswer]


class RegistryAnswer(msgspec.Struct, kw_only=True):
    """What is behind `revision` is there only of a follower."""

    role: Literal["own", "follower"]
    instance: str
    epoch: int
    revision: int
    control_plane: str = ""
    connected: bool = True
    last_sync_ms: int | None = None
    last_error: str | None = None
