"""Streams as entries of the registry: create, list, describe, change and delete them.

An answer shows the settings in force: where a stream sets nothing, the broker's setting.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.streams import stream_settings
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_OFFSET, MAX_QUEUE_DEPTH, Limits
from penstock.model.options import duration_ms, whole_number
from penstock.model.streams import Lag
from penstock.model.tenancy import DeliveryMode, Entry, StreamConfig
from penstock.model.units import format_duration
from penstock.server.members import Count, limits, optional
from penstock.server.registry.entries import (
    MAX_TIMEOUT_MS,
    RETENTION,
    SIZE,
    Bytes,
    BytesText,
    DurationText,
    EntryName,
    Read,
    TimeoutText,
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
from penstock.server.routes.entry_endpoints import (
    EXAMPLE_AT,
    NAMESPACE,
    change_endpoint,
    create_endpoint,
    delete_endpoint,
    describe_endpoint,
    list_endpoint,
)
from penstock.server.routes.streams import STREAM
from penstock.server.websocket.messages import EVENT_QUEUE_DEPTH, Body, QueueDepth

S = TypeVar("S", bound="StreamSettingsBody")


class StreamSettingsBody(Body):
    """The settings of a stream; durations and sizes may have a unit."""

    delivery: Annotated[
        DeliveryMode | UnsetType | None,
        optional(
            "at_most_once: to those who are subscribed, without acks. at_least_once: named "
            "subscriptions get each event until they ack it. exactly_once: publishes are "
            "numbered too, and a repeat is not stored twice. The default is at_most_once."
        ),
    ] = UNSET
    durable: Annotated[
        bool | UnsetType | None,
        optional(
            "true: keeps its events on disk. at_least_once and exactly_once streams are always "
            "durable."
        ),
    ] = UNSET
    retention: Annotated[
        Count | DurationText | UnsetType | None,
        optional(
            "How long a durable stream keeps events, such as 7d. 0 or omitted: there is no limit."
        ),
    ] = UNSET
    retention_bytes: Annotated[
        Bytes | BytesText | UnsetType | None,
        optional("How many bytes of events a durable stream keeps, such as 10GB."),
    ] = UNSET
    event_queue_depth: Annotated[QueueDepth | UnsetType | None, EVENT_QUEUE_DEPTH] = UNSET
    event_queue_bytes: Annotated[
        Bytes | BytesText | UnsetType | None,
        optional("The same limit in bytes. May have a unit, such as 64MB."),
    ] = UNSET
    pub_queue_depth: Annotated[
        QueueDepth | UnsetType | None,
        optional("How many accepted events may wait to be fanned out before a publish must wait."),
    ] = UNSET
    publish_queue_wait_timeout_ms: Annotated[
        Annotated[int, limits(minimum=1, maximum=MAX_TIMEOUT_MS)] | TimeoutText | UnsetType | None,
        optional(
            "How long a publish waits in a full queue before it is refused with 429. May "
            "have a unit, such as 2s."
        ),
    ] = UNSET
    lag_alert_events: Annotated[
        Count | UnsetType | None,
        optional("A subscription that is further behind than this has its alert on; 0 is never."),
    ] = UNSET
    disconnect_slow_ms: Annotated[
        Annotated[int, limits(minimum=0, maximum=MAX_TIMEOUT_MS)] | TimeoutText | UnsetType | None,
        optional("Ends a subscription that was too slow for this long; 0 is never."),
    ] = UNSET


class StreamBody(StreamSettingsBody):
    name: EntryName = None


class StreamAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
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
    retention_bytes: int
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


class StreamList(msgspec.Struct):
    streams: list[StreamAnswer]


_stream_decoder = msgspec.json.Decoder(StreamBody)
_settings_decoder = msgspec.json.Decoder(StreamSettingsBody)

_MEMBERS: dict[str, tuple[str, Read]] = {
    "delivery": ("delivery", as_it_is),
    "durable": ("durable", as_it_is),
    "retention": ("retention_ms", RETENTION),
    "retention_bytes": ("retention_bytes", SIZE),
    "event_queue_depth": ("event_queue_depth", read_as(whole_number(1, MAX_QUEUE_DEPTH))),
    "event_queue_bytes": ("event_queue_bytes", SIZE),
    "pub_queue_depth": ("pub_queue_depth", read_as(whole_number(1, MAX_QUEUE_DEPTH))),
    "publish_queue_wait_timeout_ms": (
        "publish_queue_wait_timeout_ms",
        read_as(duration_ms(1, MAX_TIMEOUT_MS)),
    ),
    "lag_alert_events": ("lag_alert_events", read_as(whole_number(0, MAX_OFFSET))),
    "disconnect_slow_ms": ("disconnect_slow_ms", read_as(duration_ms(0, MAX_TIMEOUT_MS))),
}


def stream_config(body: StreamSettingsBody, now: StreamConfig | None = None) -> StreamConfig:
    config = read_config(body, _MEMBERS, now, StreamConfig())
    if config.delivery != "at_most_once" and body.durable in (UNSET, None):
        return msgspec.structs.replace(config, durable=True)
    return config


def stream_answer(entry: Entry, limits: Limits) -> StreamAnswer:
    config = entry.stream or StreamConfig()
    in_force = msgspec.structs.asdict(stream_settings(config, limits))
    origins = {name: "broker" if getattr(config, name) is None else "stream" for name in in_force}
    return StreamAnswer(
        name=entry.name,
        tenant_id=entry.tenant_id,
        namespace=entry.namespace,
        delivery=config.delivery,
        durable=config.durable,
        ordering="per_stream",
        retention=format_duration(config.retention_ms) if config.retention_ms else None,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        **in_force,
        pub_workers_per_conn=limits.pub_workers_per_conn,
        origins=origins | {"pub_workers_per_conn": "broker"},
        created_ms=entry.created_ms,
        revision=entry.revision,
    )


def _body(exchange: RegistryRequest, decoder: msgspec.json.Decoder[S]) -> S:
    """An answer shows the retention under two names; a body may have only one of them."""
    try:
        return exchange.body(decoder)
    except InvalidArgument as error:
        if error.message != "unknown member 'retention_ms'":
            raise
        hint = f"{error.message}: use retention, in milliseconds or with a unit, such as 7d"
        raise InvalidArgument(hint) from error


@changing
def create_stream(exchange: RegistryRequest) -> None:
    body = _body(exchange, _stream_decoder)
    tenant, namespace, name = exchange.path(body.name)
    config = stream_config(body)
    wanted = Entry(kind="stream", tenant_id=tenant, namespace=namespace, name=name, stream=config)
    create(exchange, wanted, stream_answer)


@reading
def list_streams(exchange: RegistryRequest) -> None:
    done = send_list(exchange, "stream", stream_answer, StreamList)
    exchange.registry.children("namespace", exchange.path(), done)


@reading
def describe_stream(exchange: RegistryRequest) -> None:
    path = exchange.path()

    def found(entry: Entry) -> None:
        answer = stream_answer(entry, exchange.dispatch.engine.limits)

        def counted(subscriptions: list[Lag]) -> None:
            answer.subscribers = len(subscriptions)
            exchange.send(200, answer)

        exchange.dispatch.engine.streams.subscriptions(path, exchange.then(counted))

    exchange.registry.get("stream", path, exchange.then(found))


@changing
def change_stream(exchange: RegistryRequest) -> None:
    body = _body(exchange, _settings_decoder)
    change(exchange, "stream", lambda entry: stream_config(body, entry.stream), stream_answer)


_EXAMPLE: dict[str, Any] = {
    "name": "orders",
    "tenant_id": "acme",
    "namespace": "prod",
    "delivery": "at_least_once",
    "durable": True,
    "ordering": "per_stream",
    "retention": None,
    "retention_ms": 0,
    "retention_bytes": 0,
    "event_queue_depth": 4096,
    "event_queue_bytes": 67_108_864,
    "pub_queue_depth": 1024,
    "publish_queue_wait_timeout_ms": 2000,
    "lag_alert_events": 1000,
    "disconnect_slow_ms": 0,
    "pub_workers_per_conn": 4,
    "origins": {"event_queue_depth": "stream", "pub_queue_depth": "broker"},
    **EXAMPLE_AT,
}
_SETTINGS = {"event_queue_depth": 4096}

ENDPOINTS = (
    list_endpoint(f"{NAMESPACE}/streams", list_streams, "streams", StreamList, _EXAMPLE),
    create_endpoint(
        f"{NAMESPACE}/streams",
        create_stream,
        "stream",
        StreamBody,
        {"name": "orders", "delivery": "at_least_once"} | _SETTINGS,
        (StreamAnswer, _EXAMPLE),
    ),
    describe_endpoint(
        STREAM,
        describe_stream,
        "stream",
        (StreamAnswer, _EXAMPLE | {"subscribers": 3}),
        "Every setting in force, and the number of subscribers.",
    ),
    change_endpoint(
        STREAM,
        change_stream,
        "stream",
        StreamSettingsBody,
        _SETTINGS,
        (StreamAnswer, _EXAMPLE),
    ),
    delete_endpoint(STREAM, deleting("stream"), "stream", "Ends its subscriptions."),
)
