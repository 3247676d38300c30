"""Tenants, namespaces, and streams and caches as entries of the registry, described."""

from __future__ import annotations

from typing import Any

from penstock.server.answers import (
    CacheAnswer,
    CacheList,
    NamespaceAnswer,
    NamespaceList,
    StreamAnswer,
    StreamList,
    TenantAnswer,
    TenantList,
)
from penstock.server.operations.endpoint import DONE, Answer, Operation
from penstock.server.registry.entries import (
    CacheBody,
    CacheSettingsBody,
    NamespaceBody,
    StreamBody,
    StreamSettingsBody,
    TenantBody,
)

TENANTS = "/v1/tenants"
TENANT = TENANTS + "/{tenant_id}"
NAMESPACE = TENANT + "/namespaces/{namespace}"

_CREATE_ERRORS = (400, 404, 409, 413, 429, 503)
_CHANGE_ERRORS = (400, 404, 409, 413, 429, 503)
_AT = {"created_ms": 1_767_225_600_000, "revision": 5}
_TENANT = {"tenant_id": "acme", **_AT}
_NAMESPACE = {"tenant_id": "acme", "namespace": "prod", **_AT}
_STREAM = {
    "name": "orders",
    "tenant_id": "acme",
    "namespace": "prod",
    "delivery": "at_most_once",
    "durable": False,
    "ordering": "per_stream",
    "retention": None,
    "retention_ms": 0,
    "event_queue_depth": 4096,
    "event_queue_bytes": 67_108_864,
    "pub_queue_depth": 1024,
    "publish_queue_wait_timeout_ms": 2000,
    "lag_alert_events": 1000,
    "disconnect_slow_ms": 0,
    "pub_workers_per_conn": 4,
    "origins": {"event_queue_depth": "stream", "pub_queue_depth": "broker"},
    **_AT,
}
_CACHE = {
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
    **_AT,
}


def _created(shape: Any, example: Any) -> dict[int, Answer]:
    return {
        201: Answer("Created.", shape, example),
        200: Answer("It was there, with the same settings.", shape, example),
    }


def _list(path: str, what: str, shape: Any, example: Any) -> Operation:
    return Operation(
        method="GET",
        path=path,
        tag="Tenants",
        summary=f"List {what}",
        answers={200: Answer("Sorted by name.", shape, {what: [example]})},
        errors=(503,) if path == TENANTS else (400, 404, 503),
    )


def _describe(path: str, what: str, text: str, shape: Any, example: Any) -> Operation:
    return Operation(
        method="GET",
        path=path,
        tag="Tenants",
        summary=f"Describe a {what}",
        text=text,
        answers={200: Answer(f"The {what}.", shape, example)},
        errors=(400, 404, 503),
    )


def _delete(path: str, what: str, text: str, query: tuple[str, ...] = ()) -> Operation:
    return Operation(
        method="DELETE",
        path=path,
        tag="Tenants",
        summary=f"Delete a {what}",
        text=text,
        query=query,
        answers=DONE,
        errors=(400, 404, 409, 429, 503) if query else (400, 404, 429, 503),
    )


def _create(path: str, what: str, body: Any, name: str, example: Any, shown: Any) -> Operation:
    shapes: dict[str, Any] = {
        "tenant": TenantAnswer,
        "namespace": NamespaceAnswer,
        "stream": StreamAnswer,
        "cache": CacheAnswer,
    }
    return Operation(
        method="POST",
        path=path,
        tag="Tenants",
        summary=f"Create a {what}",
        body=body,
        required=(name,),
        query=(),
        example=example,
        answers=_created(shapes[what], shown),
        errors=_CREATE_ERRORS,
    )


def _change(path: str, what: str, body: Any, example: Any, shape: Any, shown: Any) -> Operation:
    return Operation(
        method="PATCH",
        path=path,
        tag="Tenants",
        summary=f"Change a {what}'s settings",
        text="What is named is changed; null is the default again.",
        body=body,
        query=(),
        example=example,
        answers={200: Answer("As it is now.", shape, shown)},
        errors=_CHANGE_ERRORS,
    )


_SETS_STREAM = {"event_queue_depth": 4096}
_SETS_CACHE = {"max_entries": 100_000, "max_bytes": "1GB", "eviction_policy": "lru"}
_STREAM_PATH = NAMESPACE + "/streams/{stream}"
_CACHE_PATH = NAMESPACE + "/caches/{cache}"

OPERATIONS: tuple[Operation, ...] = (
    _list(TENANTS, "tenants", TenantList, _TENANT),
    _create(TENANTS, "tenant", TenantBody, "tenant_id", {"tenant_id": "acme"}, _TENANT),
    _describe(TENANT, "tenant", "", TenantAnswer, _TENANT),
    _delete(TENANT, "tenant", "409 if it has namespaces, unless cascade is true.", ("cascade",)),
    _list(f"{TENANT}/namespaces", "namespaces", NamespaceList, _NAMESPACE),
    _create(
        f"{TENANT}/namespaces",
        "namespace",
        NamespaceBody,
        "namespace",
        {"namespace": "prod"},
        _NAMESPACE,
    ),
    _describe(NAMESPACE, "namespace", "", NamespaceAnswer, _NAMESPACE),
    _delete(
        NAMESPACE,
        "namespace",
        "409 if it has streams or caches, unless cascade is true.",
        ("cascade",),
    ),
    _list(f"{NAMESPACE}/streams", "streams", StreamList, _STREAM),
    _create(
        f"{NAMESPACE}/streams",
        "stream",
        StreamBody,
        "name",
        {"name": "orders"} | _SETS_STREAM,
        _STREAM,
    ),
    _describe(
        _STREAM_PATH,
        "stream",
        "Every setting that is in force, and how many subscribe.",
        StreamAnswer,
        _STREAM | {"subscribers": 3},
    ),
    _change(_STREAM_PATH, "stream", StreamSettingsBody, _SETS_STREAM, StreamAnswer, _STREAM),
    _delete(_STREAM_PATH, "stream", "Its subscriptions end."),
    _list(f"{NAMESPACE}/caches", "caches", CacheList, _CACHE),
    _create(
        f"{NAMESPACE}/caches",
        "cache",
        CacheBody,
        "name",
        {"name": "sessions"} | _SETS_CACHE,
        _CACHE,
    ),
    _describe(
        _CACHE_PATH,
        "cache",
        "Every setting that is in force, and what it holds.",
        CacheAnswer,
        _CACHE | {"entries": 17, "bytes": 6290},
    ),
    _change(_CACHE_PATH, "cache", CacheSettingsBody, _SETS_CACHE, CacheAnswer, _CACHE),
    _delete(_CACHE_PATH, "cache", "With all that it holds; its watches end."),
)
