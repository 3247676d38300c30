"""Caches as entries of the registry: create, list, describe, change and delete them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.limits import MAX_OFFSET, Limits
from penstock.model.options import whole_number
from penstock.model.tenancy import CacheConfig, Entry, EvictionPolicy
from penstock.server.members import optional
from penstock.server.registry.entries import (
    SIZE,
    Bytes,
    BytesText,
    EntryName,
    Read,
    as_it_is,
    read_as,
    read_config,
)
from penstock.server.registry.exchange import (
    RegistryRequest,
    change,
    changing,
    create,
    deleting,
    reading,
    send_list,
)
from penstock.server.routes.caches import CACHE
from penstock.server.routes.entry_endpoints import (
    EXAMPLE_AT,
    NAMESPACE,
    change_endpoint,
    create_endpoint,
    delete_endpoint,
    describe_endpoint,
    list_endpoint,
)
from penstock.server.websocket.messages import Body


class CacheSettingsBody(Body):
    """The settings of a cache; `max_bytes` may have a unit."""

    max_entries: Annotated[
        Bytes | UnsetType | None, optional("The most entries; null is no limit.")
    ] = UNSET
    max_bytes: Annotated[
        Bytes | BytesText | UnsetType | None,
        optional("Bytes of keys and values, plus 320 per entry. May have a unit, such as 1GB."),
    ] = UNSET
    eviction_policy: Annotated[
        EvictionPolicy | UnsetType | None,
        optional(
            "Which entries a full cache removes. lru: the least recently used; best_effort: any."
        ),
    ] = UNSET
    durable: Annotated[
        bool | UnsetType | None,
        optional("true: keeps its contents across restarts."),
    ] = UNSET


class CacheBody(CacheSettingsBody):
    name: EntryName = None


class CacheAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
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


class CacheList(msgspec.Struct):
    caches: list[CacheAnswer]


_cache_decoder = msgspec.json.Decoder(CacheBody)
_settings_decoder = msgspec.json.Decoder(CacheSettingsBody)

_MEMBERS: dict[str, tuple[str, Read]] = {
    "max_entries": ("max_entries", read_as(whole_number(1, MAX_OFFSET))),
    "max_bytes": ("max_bytes", SIZE),
    "eviction_policy": ("eviction_policy", as_it_is),
    "durable": ("durable", as_it_is),
}


def cache_config(body: CacheSettingsBody, now: CacheConfig | None = None) -> CacheConfig:
    return read_config(body, _MEMBERS, now, CacheConfig())


def cache_answer(entry: Entry, limits: Limits) -> CacheAnswer:
    config = entry.cache or CacheConfig()
    return CacheAnswer(
        name=entry.name,
        tenant_id=entry.tenant_id,
        namespace=entry.namespace,
        durable=config.durable,
        consistency="linearizable",
        ttl_precision="exact",
        max_entries=config.max_entries or None,
        max_bytes=config.max_bytes or None,
        eviction_policy=config.eviction_policy,
        cache_memory_bytes=limits.cache_memory_bytes,
        origins={
            "max_entries": "cache",
            "max_bytes": "cache",
            "eviction_policy": "cache",
            "cache_memory_bytes": "broker",
        },
        created_ms=entry.created_ms,
        revision=entry.revision,
    )


@changing
def create_cache(exchange: RegistryRequest) -> None:
    body = exchange.body(_cache_decoder)
    tenant, namespace, name = exchange.path(body.name)
    config = cache_config(body)
    wanted = Entry(kind="cache", tenant_id=tenant, namespace=namespace, name=name, cache=config)
    create(exchange, wanted, cache_answer)


@reading
def list_caches(exchange: RegistryRequest) -> None:
    done = send_list(exchange, "cache", cache_answer, CacheList)
    exchange.registry.children("namespace", exchange.path(), done)


@reading
def describe_cache(exchange: RegistryRequest) -> None:
    path = exchange.path()

    def found(entry: Entry) -> None:
        answer = cache_answer(entry, exchange.dispatch.engine.limits)

        def measured(found: tuple[int, int]) -> None:
            answer.entries, answer.bytes = found
            exchange.send(200, answer)

        exchange.dispatch.engine.caches.size(path, exchange.then(measured))

    exchange.registry.get("cache", path, exchange.then(found))


@changing
def change_cache(exchange: RegistryRequest) -> None:
    body = exchange.body(_settings_decoder)
    change(exchange, "cache", lambda entry: cache_config(body, entry.cache), cache_answer)


_EXAMPLE: dict[str, Any] = {
    "name": "sessions",
    "tenant_id": "acme",
    "namespace": "prod",
    "durable": False,
    "consistency": "linearizable",
    "ttl_precision": "exact",
    "max_entries": 100_000,
    "max_bytes": 1_073_741_824,
    "eviction_policy": "lru",
    "cache_memory_bytes": 268_435_456,
    "origins": {"max_entries": "cache", "cache_memory_bytes": "broker"},
    **EXAMPLE_AT,
}
_SETTINGS = {"max_entries": 100_000, "max_bytes": "1GB", "eviction_policy": "lru"}

ENDPOINTS = (
    list_endpoint(f"{NAMESPACE}/caches", list_caches, "caches", CacheList, _EXAMPLE),
    create_endpoint(
        f"{NAMESPACE}/caches",
        create_cache,
        "cache",
        CacheBody,
        {"name": "sessions"} | _SETTINGS,
        (CacheAnswer, _EXAMPLE),
    ),
    describe_endpoint(
        CACHE,
        describe_cache,
        "cache",
        (CacheAnswer, _EXAMPLE | {"entries": 17, "bytes": 6290}),
        "Every setting in force, and the number and bytes of the entries.",
    ),
    change_endpoint(
        CACHE, change_cache, "cache", CacheSettingsBody, _SETTINGS, (CacheAnswer, _EXAMPLE)
    ),
    delete_endpoint(
        CACHE, deleting("cache"), "cache", "Deletes its entries too, and ends its watches."
    ),
)
