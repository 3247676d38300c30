"""Tenants, namespaces, streams and caches as people write them, and as they are shown.

Bodies are decoded strictly. A member left out keeps what is, `null` is the default again. What is
shown is in force: where a stream sets nothing, the broker's setting, and `origins` says which.
Must not know requests or replies; whether an entry can be so is decided in core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.streams import stream_settings
from penstock.model.errors import FailedPrecondition, InvalidArgument
from penstock.model.limits import MAX_OFFSET, MAX_QUEUE_DEPTH, Limits
from penstock.model.names import clean_name
from penstock.model.tenancy import (
    CacheConfig,
    DeliveryMode,
    Entry,
    EvictionPolicy,
    Path,
    StreamConfig,
)
from penstock.model.units import format_duration, parse_duration_ms, parse_size
from penstock.server.websocket.messages import Body

MAX_TIMEOUT_MS = 600_000
"""Ten minutes: what waits longer than that is stuck."""

C = TypeVar("C", StreamConfig, CacheConfig)


class TenantBody(Body):
    tenant_id: str | None = None


class NamespaceBody(Body):
    namespace: str | None = None


class StreamSettingsBody(Body):
    """How a stream is set; durations and sizes may have a unit."""

    delivery: DeliveryMode | UnsetType | None = UNSET
    durable: bool | UnsetType | None = UNSET
    retention: int | str | UnsetType | None = UNSET
    event_queue_depth: int | UnsetType | None = UNSET
    event_queue_bytes: int | str | UnsetType | None = UNSET
    pub_queue_depth: int | UnsetType | None = UNSET
    publish_queue_wait_timeout_ms: int | str | UnsetType | None = UNSET
    lag_alert_events: int | UnsetType | None = UNSET
    disconnect_slow_ms: int | str | UnsetType | None = UNSET


class StreamBody(StreamSettingsBody):
    name: str | None = None


class CacheSettingsBody(Body):
    """How a cache is set; `max_bytes` may have a unit."""

    max_entries: int | UnsetType | None = UNSET
    max_bytes: int | str | UnsetType | None = UNSET
    eviction_policy: EvictionPolicy | UnsetType | None = UNSET
    durable: bool | UnsetType | None = UNSET


class CacheBody(CacheSettingsBody):
    name: str | None = None


# -- reading -------------------------------------------------------------------------------------

Read = Callable[[str, Any], Any]
"""Takes a member's name and value; gives what is kept, or raises InvalidArgument."""


def _as_it_is(_: str, value: Any) -> Any:
    return value


def _whole(least: int, most: int) -> Read:
    def read(name: str, value: int) -> int:
        if not least <= value <= most:
            raise InvalidArgument(f"{name} must be {least} to {most:,}, not {value}")
        return value

    return read


def _duration(least: int, most: int) -> Read:
    def read(name: str, value: int | str) -> int:
        ms = parse_duration_ms(value) if isinstance(value, str) else value
        if ms is None:
            raise InvalidArgument(
                f"{name}: {value!r} is no duration; it is milliseconds, or has a unit as "
                "250ms, 2s, 5m, 1h or 7d"
            )
        if not least <= ms <= most:
            raise InvalidArgument(f"{name} must be {least} to {most:,} ms, not {value!r}")
        return ms

    return read


def _size(name: str, value: int | str) -> int:
    nbytes = parse_size(value) if isinstance(value, str) else value
    if nbytes is None:
        raise InvalidArgument(
            f"{name}: {value!r} is no size; it is bytes, or has a unit as 512KB, 64MB or 1GB"
        )
    if not 1 <= nbytes <= MAX_OFFSET:
        raise InvalidArgument(f"{name} must be 1 to {MAX_OFFSET:,} bytes, not {value!r}")
    return nbytes


_STREAM_MEMBERS: dict[str, tuple[str, Read]] = {
    "delivery": ("delivery", _as_it_is),
    "durable": ("durable", _as_it_is),
    "retention": ("retention_ms", _duration(0, MAX_OFFSET)),
    "event_queue_depth": ("event_queue_depth", _whole(1, MAX_QUEUE_DEPTH)),
    "event_queue_bytes": ("event_queue_bytes", _size),
    "pub_queue_depth": ("pub_queue_depth", _whole(1, MAX_QUEUE_DEPTH)),
    "publish_queue_wait_timeout_ms": (
        "publish_queue_wait_timeout_ms",
        _duration(1, MAX_TIMEOUT_MS),
    ),
    "lag_alert_events": ("lag_alert_events", _whole(0, MAX_OFFSET)),
    "disconnect_slow_ms": ("disconnect_slow_ms", _duration(0, MAX_TIMEOUT_MS)),
}
_CACHE_MEMBERS: dict[str, tuple[str, Read]] = {
    "max_entries": ("max_entries", _whole(1, MAX_OFFSET)),
    "max_bytes": ("max_bytes", _size),
    "eviction_policy": ("eviction_policy", _as_it_is),
    "durable": ("durable", _as_it_is),
}
"""Member of the body: its name in the config, and how it is read."""


def stream_config(body: StreamSettingsBody, now: StreamConfig | None = None) -> StreamConfig:
    """How the stream is to be set, given how it is set now."""
    return _config(body, _STREAM_MEMBERS, now or StreamConfig(), StreamConfig())


def cache_config(body: CacheSettingsBody, now: CacheConfig | None = None) -> CacheConfig:
    return _config(body, _CACHE_MEMBERS, now or CacheConfig(), CacheConfig())


def _config(body: Body, members: dict[str, tuple[str, Read]], now: C, default: C) -> C:
    values = {}
    for member, (name, read) in members.items():
        value = getattr(body, member)
        if value is None:
            values[name] = getattr(default, name)
        elif value is not UNSET:
            values[name] = read(member, value)
    return msgspec.structs.replace(now, **values)


def check_lasting(entry: Entry, config: StreamConfig | CacheConfig) -> None:
    """Refuses to make another thing of it: that is a new one under another name."""
    now = entry.stream or entry.cache
    for name in ("delivery", "durable"):
        if getattr(config, name, None) != getattr(now, name, None):
            raise FailedPrecondition(
                f"{name} of {entry.kind} {'/'.join(entry.path)!r} cannot change; create another"
            )


def entry_path(*names: str | None) -> Path:
    """The names on the way to an entry, cleaned; those that do not apply are empty."""
    what = ("tenant_id", "namespace", "name")
    cleaned = [clean_name(name, each) for name, each in zip(names, what, strict=False)]
    tenant, namespace, name = [*cleaned, "", ""][:3]
    return tenant, namespace, name


# -- showing -------------------------------------------------------------------------------------


def show(entry: Entry, limits: Limits) -> dict[str, Any]:
    """An entry with every setting that is in force for it."""
    shown: dict[str, Any] = {"tenant_id": entry.tenant_id}
    if entry.kind != "tenant":
        shown["namespace"] = entry.namespace
    if entry.stream is not None:
        shown = {"name": entry.name} | shown | _show_stream(entry.stream, limits)
    elif entry.cache is not None:
        shown = {"name": entry.name} | shown | _show_cache(entry.cache, limits)
    return shown | {"created_ms": entry.created_ms, "revision": entry.revision}


def _show_stream(config: StreamConfig, limits: Limits) -> dict[str, Any]:
    in_force = msgspec.structs.asdict(stream_settings(config, limits))
    origins = {name: "broker" if getattr(config, name) is None else "stream" for name in in_force}
    return {
        "delivery": config.delivery,
        "durable": config.durable,
        "ordering": "per_stream",
        "retention": format_duration(config.retention_ms) if config.retention_ms else None,
        "retention_ms": config.retention_ms,
        **in_force,
        "pub_workers_per_conn": limits.pub_workers_per_conn,
        "origins": origins | {"pub_workers_per_conn": "broker"},
    }


def _show_cache(config: CacheConfig, limits: Limits) -> dict[str, Any]:
    return {
        "durable": config.durable,
        "consistency": "linearizable",
        "ttl_precision": "exact",
        "max_entries": config.max_entries or None,
        "max_bytes": config.max_bytes or None,
        "eviction_policy": config.eviction_policy,
        "cache_memory_bytes": limits.cache_memory_bytes,
        "origins": {
            "max_entries": "cache",
            "max_bytes": "cache",
            "eviction_policy": "cache",
            "cache_memory_bytes": "broker",
        },
    }
