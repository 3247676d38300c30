"""The entries of the registry: tenants, namespaces, streams and caches, and their settings."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.quotas import Quota

Kind = Literal["tenant", "namespace", "stream", "cache"]
DeliveryMode = Literal["at_most_once", "at_least_once", "exactly_once"]
EvictionPolicy = Literal["best_effort", "lru"]

DEFAULT = "default"
"""The name of the tenant, namespace, stream and cache that a new broker has."""

Path = tuple[str, str, str]
"""Tenant, namespace and name. Parts that do not apply are empty."""


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a stream. None means the broker's setting. A durable stream keeps its events
    for `retention_ms` and up to `retention_bytes`; 0 means no limit."""

    delivery: DeliveryMode = "at_most_once"
    durable: bool = False
    retention_ms: int = 0
    event_queue_depth: int | None = None
    event_queue_bytes: int | None = None
    pub_queue_depth: int | None = None
    publish_queue_wait_timeout_ms: int | None = None
    lag_alert_events: int | None = None
    disconnect_slow_ms: int | None = None
    retention_bytes: int = 0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a cache. 0 means no limit."""

    max_entries: int = 0
    max_bytes: int = 0
    eviction_policy: EvictionPolicy = "best_effort"
    durable: bool = False


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of the registry. Its `id` is never used again; `revision` is that of its last
    change."""

    kind: Kind
    tenant_id: str
    namespace: str = ""
    name: str = ""
    id: int = 0
    revision: int = 0
    created_ms: int = 0
    stream: StreamConfig | None = None
    cache: CacheConfig | None = None
    quota: Quota | None = None

    @property
    def path(self) -> Path:
        return (self.tenant_id, self.namespace, self.name)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the registry. Its number is the entry's revision."""

    entry: Entry
    deleted: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole registry at a revision. `epoch` identifies the registry that the revision is of."""

    epoch: int
    revision: int
    entries: list[Entry]


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The changes after the requested revision, up to `revision`."""

    epoch: int
    revision: int
    changes: list[Change]
