"""Quotas of tenants and namespaces: read the limits and the use, and change the limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.quotas import QuotaReport
from penstock.model.errors import PenstockError, VersionMismatch
from penstock.model.limits import MAX_OFFSET
from penstock.model.options import per_second, size_bytes, whole_number
from penstock.model.quotas import NO_QUOTA, Quota
from penstock.model.tenancy import Entry, Kind, Path
from penstock.model.units import format_duration
from penstock.server.access import Needs, actor_of
from penstock.server.members import Count, limits, optional
from penstock.server.registry.entries import (
    RETENTION,
    SIZE,
    Bytes,
    BytesText,
    DurationText,
    Read,
    read_as,
    read_config,
)
from penstock.server.registry.exchange import RegistryRequest, changing, reading
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.entry_endpoints import NAMESPACE, TENANT
from penstock.server.websocket.messages import Body

_RateText = Annotated[str, limits(pattern=r"^\s*[1-9]\d{0,14}\s*/s\s*$")]
_BytesRateText = Annotated[
    str, limits(pattern=r"^\s*[1-9]\d{0,11}\s*([Kk][Ii]?[Bb]|[Mm][Ii]?[Bb]|[Bb])?\s*/s\s*$")
]
_Limit = Annotated[int, limits(minimum=1, maximum=MAX_OFFSET)]


class QuotaBody(Body):
    """The limits of a tenant or namespace. `null` removes one; one that is left out stays."""

    publish_rate_limit: Annotated[
        _Limit | _RateText | UnsetType | None,
        optional("Messages and events per second, such as 10000/s."),
    ] = UNSET
    publish_bytes_limit: Annotated[
        _Limit | _BytesRateText | UnsetType | None,
        optional("Their bytes per second, such as 10MB/s."),
    ] = UNSET
    subscribe_connections: Annotated[
        _Limit | UnsetType | None, optional("Open subscriptions, consumers and watches.")
    ] = UNSET
    topics: Annotated[_Limit | UnsetType | None, optional("Topics.")] = UNSET
    cache_memory: Annotated[
        Bytes | BytesText | UnsetType | None,
        optional("Bytes in caches, counted as for max_bytes of a cache. May have a unit."),
    ] = UNSET
    backlog_msgs: Annotated[
        _Limit | UnsetType | None, optional("Messages that some group has not finished.")
    ] = UNSET
    backlog_bytes: Annotated[
        Bytes | BytesText | UnsetType | None, optional("Their bytes. May have a unit.")
    ] = UNSET
    disk_bytes: Annotated[
        Bytes | BytesText | UnsetType | None,
        optional("Bytes of messages, events, durable caches and staged rows. May have a unit."),
    ] = UNSET
    stream_retention: Annotated[
        Count | DurationText | UnsetType | None,
        optional(
            "The longest retention of a topic or stream, in milliseconds or as 7d. It waits for "
            "what a group has not finished."
        ),
    ] = UNSET
    connections: Annotated[
        _Limit | UnsetType | None, optional("Open connections, of HTTP and WebSockets.")
    ] = UNSET
    idempotency_keys: Annotated[
        _Limit | UnsetType | None, optional("Idempotency keys of produces that are remembered.")
    ] = UNSET
    groups: Annotated[
        _Limit | UnsetType | None,
        optional("Groups of topics and named subscriptions of streams, together."),
    ] = UNSET
    streams: Annotated[_Limit | UnsetType | None, optional("Streams.")] = UNSET
    caches: Annotated[_Limit | UnsetType | None, optional("Caches.")] = UNSET


class QuotaAnswer(msgspec.Struct, kw_only=True):
    """`limits` has null where there is none. `refused` counts refusals since the start. `used` has
    what was accepted in the last second for the rates."""

    tenant_id: str
    namespace: str | None
    limits: dict[str, int | str | None]
    used: dict[str, int]
    refused: dict[str, int]


_decoder = msgspec.json.Decoder(QuotaBody)


_AMOUNT = whole_number(1, MAX_OFFSET)
_COUNT = read_as(_AMOUNT)
_READ: dict[str, Read] = {
    "publish_rate_limit": read_as(per_second(_AMOUNT, "10000/s")),
    "publish_bytes_limit": read_as(per_second(size_bytes(1, MAX_OFFSET), "10MB/s")),
    "subscribe_connections": _COUNT,
    "topics": _COUNT,
    "cache_memory": SIZE,
    "backlog_msgs": _COUNT,
    "backlog_bytes": SIZE,
    "disk_bytes": SIZE,
    "stream_retention": RETENTION,
    "connections": _COUNT,
    "idempotency_keys": _COUNT,
    "groups": _COUNT,
    "streams": _COUNT,
    "caches": _COUNT,
}
_MEMBERS = {name: (name, read) for name, read in _READ.items()}


def quota_config(body: QuotaBody, now: Quota | None = None) -> Quota | None:
    """Returns the quota that the body asks for, given the quota now; None for no limits."""
    quota = read_config(body, _MEMBERS, now, NO_QUOTA)
    return None if quota == NO_QUOTA else quota


def quota_answer(report: QuotaReport) -> QuotaAnswer:
    shown: dict[str, int | str | None] = {
        name: value or None for name, value in msgspec.structs.asdict(report.quota).items()
    }
    if report.quota.stream_retention:
        shown["stream_retention"] = format_duration(report.quota.stream_retention)
    return QuotaAnswer(
        tenant_id=report.scope[0],
        namespace=report.scope[1] or None,
        limits=shown,
        used=report.used,
        refused=report.refused,
    )


def _path(exchange: RegistryRequest) -> Path:
    tenant, namespace, _ = exchange.path()
    return tenant, namespace, ""


def _report(exchange: RegistryRequest) -> None:
    def send(report: QuotaReport) -> None:
        exchange.send(200, quota_answer(report))

    exchange.dispatch.engine.quotas.report(_path(exchange)[:2], exchange.then(send))


@reading
def describe_quota(exchange: RegistryRequest) -> None:
    _report(exchange)


@changing
def change_quota(exchange: RegistryRequest) -> None:
    """Changes a quota. If somebody else has changed it meanwhile, begins again, so that no change
    is lost."""
    body = exchange.body(_decoder)
    if exchange.is_followed():
        exchange.forward()
        return
    path = _path(exchange)
    kind: Kind = "namespace" if path[1] else "tenant"
    actor = actor_of(exchange.request, exchange.reply)

    def read() -> None:
        exchange.registry.get(kind, path, exchange.then(found))

    def found(entry: Entry) -> None:
        quota = quota_config(body, entry.quota)
        with exchange.dispatch.engine.audit.acting(actor):
            exchange.registry.change(path, changed, quota=quota, if_revision=entry.revision)

    def changed(outcome: Entry | PenstockError) -> None:
        if isinstance(outcome, VersionMismatch):
            read()
        else:
            exchange.then(lambda _: _report(exchange))(outcome)

    read()


_EXAMPLE: dict[str, Any] = {
    "tenant_id": "acme",
    "namespace": "prod",
    "limits": {"publish_rate_limit": 10_000, "topics": None, "stream_retention": "7d"},
    "used": {"publish_rate_limit": 800, "subscribe_connections": 3, "topics": 12},
    "refused": {"publish_rate_limit": 2},
}
_LIMITS = {"publish_rate_limit": "10000/s", "cache_memory": "10GB", "stream_retention": "7d"}


def _endpoints(path: str, what: Literal["tenant", "namespace"]) -> tuple[Endpoint, Endpoint]:
    return (
        Endpoint(
            route=f"GET {path}/quota",
            handler=describe_quota,
            access=Needs("read", what),
            tag="Tenants",
            summary=f"Describe the quota of a {what}",
            text="Its limits, how much is used, and how often something was refused.",
            answers={200: Answer("The quota.", QuotaAnswer, _EXAMPLE)},
            errors=(400, 404, 503),
        ),
        Endpoint(
            route=f"PATCH {path}/quota",
            handler=change_quota,
            # Whoever has a quota must not raise it.
            access=Needs("registry", "broker"),
            tag="Tenants",
            summary=f"Change the quota of a {what}",
            text="Changes the limits that are named; null removes one. What exceeds a new limit "
            "stays; nothing is added until there is room.",
            body=QuotaBody,
            example=_LIMITS,
            answers={200: Answer("The new quota.", QuotaAnswer, _EXAMPLE)},
            errors=(400, 404, 413, 429, 503),
        ),
    )


ENDPOINTS = (*_endpoints(TENANT, "tenant"), *_endpoints(NAMESPACE, "namespace"))
