"""The registry over HTTP: tenants, namespaces, streams and caches come, are shown, change, go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from penstock.api.outcomes import Done
from penstock.model.errors import InvalidArgument, PenstockError, VersionMismatch
from penstock.model.streams import Lag
from penstock.model.tenancy import CacheConfig, Entry, Kind, StreamConfig
from penstock.server.http.dispatch import Handler
from penstock.server.registry.entries import (
    CacheBody,
    CacheSettingsBody,
    NamespaceBody,
    StreamBody,
    StreamSettingsBody,
    TenantBody,
    cache_config,
    check_lasting,
    entry_path,
    show,
    stream_config,
)
from penstock.server.registry_exchange import PREFIX, SHOWN_BYTES, Exchange, changing, looking

S = TypeVar("S", bound=StreamSettingsBody)

_tenant = msgspec.json.Decoder(TenantBody)
_namespace = msgspec.json.Decoder(NamespaceBody)
_stream = msgspec.json.Decoder(StreamBody)
_stream_settings = msgspec.json.Decoder(StreamSettingsBody)
_cache = msgspec.json.Decoder(CacheBody)
_cache_settings = msgspec.json.Decoder(CacheSettingsBody)


def _stream_body(exchange: Exchange, decoder: msgspec.json.Decoder[S]) -> S:
    """The settings of a stream. An answer shows the retention twice; only one name is taken."""
    try:
        return exchange.body(decoder)
    except InvalidArgument as error:
        if error.message != "unknown member 'retention_ms'":
            raise
        hint = f"{error.message}: use retention, in milliseconds or with a unit, such as 7d"
        raise InvalidArgument(hint) from error


def _create(exchange: Exchange, wanted: Entry) -> None:
    def created(outcome: tuple[Entry, bool]) -> None:
        entry, is_new = outcome
        exchange.show(201 if is_new else 200, entry)

    exchange.registry.create(wanted, exchange.then(created))


@changing
def create_tenant(exchange: Exchange) -> None:
    tenant, _, _ = entry_path(exchange.body(_tenant).tenant_id)
    _create(exchange, Entry(kind="tenant", tenant_id=tenant))


@changing
def _create_namespace(exchange: Exchange) -> None:
    tenant, namespace, _ = exchange.path(exchange.body(_namespace).namespace)
    _create(exchange, Entry(kind="namespace", tenant_id=tenant, namespace=namespace))


@changing
def _create_stream(exchange: Exchange) -> None:
    body = _stream_body(exchange, _stream)
    tenant, namespace, name = exchange.path(body.name)
    config = stream_config(body)
    _create(
        exchange,
        Entry(kind="stream", tenant_id=tenant, namespace=namespace, name=name, stream=config),
    )


@changing
def _create_cache(exchange: Exchange) -> None:
    body = exchange.body(_cache)
    tenant, namespace, name = exchange.path(body.name)
    config = cache_config(body)
    _create(
        exchange,
        Entry(kind="cache", tenant_id=tenant, namespace=namespace, name=name, cache=config),
    )


def _list(exchange: Exchange, kind: Kind) -> Done[list[Entry]]:
    def found(entries: list[Entry]) -> None:
        exchange.reply.when_room(SHOWN_BYTES * len(entries), lambda: send(entries))

    def send(entries: list[Entry]) -> None:
        limits = exchange.hub.engine.limits
        shown = [show(entry, limits) for entry in entries if entry.kind == kind]
        exchange.send(200, {f"{kind}s": shown})

    return exchange.then(found)


@looking
def list_tenants(exchange: Exchange) -> None:
    exchange.registry.tenants(_list(exchange, "tenant"))


@looking
def _list_namespaces(exchange: Exchange) -> None:
    exchange.registry.children("tenant", exchange.path(), _list(exchange, "namespace"))


@looking
def _list_streams(exchange: Exchange) -> None:
    exchange.registry.children("namespace", exchange.path(), _list(exchange, "stream"))


@looking
def _list_caches(exchange: Exchange) -> None:
    exchange.registry.children("namespace", exchange.path(), _list(exchange, "cache"))


def _describing(kind: Kind) -> Handler:
    @looking
    def describe(exchange: Exchange) -> None:
        exchange.registry.get(
            kind, exchange.path(), exchange.then(lambda entry: exchange.show(200, entry))
        )

    return describe


@looking
def _describe_stream(exchange: Exchange) -> None:
    """Its settings, and how many listen."""
    path = exchange.path()

    def found(entry: Entry) -> None:
        shown = show(entry, exchange.hub.engine.limits)

        def counted(subscriptions: list[Lag]) -> None:
            exchange.send(200, shown | {"subscribers": len(subscriptions)})

        exchange.hub.engine.streams.subscriptions(path, exchange.then(counted))

    exchange.registry.get("stream", path, exchange.then(found))


@looking
def _describe_cache(exchange: Exchange) -> None:
    """Its settings, and what it holds."""
    path = exchange.path()

    def found(entry: Entry) -> None:
        shown = show(entry, exchange.hub.engine.limits)

        def measured(size: tuple[int, int]) -> None:
            exchange.send(200, shown | {"entries": size[0], "bytes": size[1]})

        exchange.hub.engine.caches.size(path, exchange.then(measured))

    exchange.registry.get("cache", path, exchange.then(found))


def _change(
    exchange: Exchange, kind: Kind, configured: Callable[[Entry], StreamConfig | CacheConfig]
) -> None:
    """Looks again when somebody else has changed it meanwhile, so that no change is lost."""
    path = exchange.path()

    def look() -> None:
        exchange.registry.get(kind, path, exchange.then(found))

    def found(entry: Entry) -> None:
        config = configured(entry)
        check_lasting(entry, config)
        exchange.registry.change(
            path,
            changed,
            stream=config if isinstance(config, StreamConfig) else None,
            cache=config if isinstance(config, CacheConfig) else None,
            if_revision=entry.revision,
        )

    def changed(outcome: Entry | PenstockError) -> None:
        if isinstance(outcome, VersionMismatch):
            look()
        else:
            exchange.then(partial(exchange.show, 200))(outcome)

    look()


@changing
def _change_stream(exchange: Exchange) -> None:
    body = _stream_body(exchange, _stream_settings)
    _change(exchange, "stream", lambda entry: stream_config(body, entry.stream))


@changing
def _change_cache(exchange: Exchange) -> None:
    body = exchange.body(_cache_settings)
    _change(exchange, "cache", lambda entry: cache_config(body, entry.cache))


def _deleting(kind: Kind) -> Handler:
    @changing
    def delete(exchange: Exchange) -> None:
        cascade = exchange.request.params().get("cascade", "false")
        if cascade not in ("true", "false"):
            raise InvalidArgument("cascade must be true or false")
        exchange.registry.delete(kind, exchange.path(), cascade == "true", exchange.settle)

    return delete


# -- paths ---------------------------------------------------------------------------------------

_METHODS: dict[tuple[bytes, ...], dict[bytes, Handler]] = {
    (): {b"GET": _describing("tenant"), b"DELETE": _deleting("tenant")},
    (b"namespaces",): {b"GET": _list_namespaces, b"POST": _create_namespace},
    (b"namespaces", b""): {b"GET": _describing("namespace"), b"DELETE": _deleting("namespace")},
    (b"namespaces", b"", b"streams"): {b"GET": _list_streams, b"POST": _create_stream},
    (b"namespaces", b"", b"streams", b""): {
        b"GET": _describe_stream,
        b"PATCH": _change_stream,
        b"DELETE": _deleting("stream"),
    },
    (b"namespaces", b"", b"caches"): {b"GET": _list_caches, b"POST": _create_cache},
    (b"namespaces", b"", b"caches", b""): {
        b"GET": _describe_cache,
        b"PATCH": _change_cache,
        b"DELETE": _deleting("cache"),
    },
}
"""What follows /v1/tenants/{tenant_id}; an empty part stands for a name."""


def registry_route(path: bytes) -> dict[bytes, Handler] | None:
    """/v1/tenants/{tenant_id} and, below it, namespaces, their streams and their caches."""
    if not path.startswith(PREFIX):
        return None
    tenant, *parts = path[len(PREFIX) :].split(b"/")
    names = [tenant, *parts[1::2]]
    if not all(names):
        return None
    parts[1::2] = [b""] * len(parts[1::2])
    return _METHODS.get(tuple(parts))
