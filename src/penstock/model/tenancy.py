"""What the registry holds: tenants, namespaces, streams and caches, and how each is set up."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["tenant", "namespace", "stream", "cache"]
DeliveryMode = Literal["at_most_once", "at_least_once", "exactly_once"]
EvictionPolicy = Literal["best_effort", "lru"]

DEFAULT = "default"
"""The tenant, and in it the namespace, stream and cache, that a fresh broker begins with."""

Path = tuple[str, str, str]
"""Tenant, namespace, name; what does not apply is empty."""


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: as the broker is set. `retention_ms` 0: none."""

    delivery: DeliveryMode = "at_most_once"
    durable: bool = False
    retention_ms: int = 0
    event_queue_depth: int | None = None
    event_queue_bytes: int | None = None
    pub_queue_depth: int | None = None
    publish_queue_wait_timeout_ms: int | None = None
    lag_alert_events: int | None = None
    disconnect_slow_ms: int | None = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """0: no limit of its own."""

    max_entries: int = 0
    max_bytes: int = 0
    eviction_policy: EvictionPolicy = "best_effort"
    durable: bool = False


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing in the registry. `id` is never used again; `revision` is of its last change."""

    kind: Kind
    tenant_id: str
    namespace: str = ""
    name: str = ""
    id: int = 0
    revision: int = 0
    created_ms: int = 0
    stream: StreamConfig | None = None
    cache: CacheConfig | None = None

    @property
    def path(self) -> Path:
        return (self.tenant_id, self.namespace, self.name)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the registry; the steps are numbered by their entries' revisions."""

    entry: Entry
    deleted: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole registry at a revision. `epoch` tells one registry's revisions from another's."""

    epoch: int
    revision: int
    entries: list[Entry]


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What happened after the revision that was asked for, up to `revision`."""

    epoch: int
    revision: int
    changes: list[Change]
