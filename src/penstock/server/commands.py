"""Makes commands of the messages and bodies of streams and caches.

Checks required members, names and numbers. The engine checks what holds for every command, such as
the form of a key or the size of a value.
"""

from __future__ import annotations

import secrets
from datetime import datetime

import msgspec

from penstock.api.caches import check_key
from penstock.api.engine import Engine
from penstock.api.messages import Settle
from penstock.model.caching import Check, Delete, Increment, Precondition, Put, Txn, Watch
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_LEASE_MS, MAX_OFFSET, MAX_POSITION, MAX_REASON_BYTES
from penstock.model.names import clean_name
from penstock.model.options import check_number
from penstock.model.streams import Publish, Start, Subscribe, SubscribeNamed
from penstock.model.tenancy import Path
from penstock.server.websocket.decoding import ListDecoder
from penstock.server.websocket.messages import (
    GetManyBody,
    PublishBatchBody,
    PublishBody,
    PutBody,
    SubscribeMessage,
    TxnBody,
    TxnCheck,
    TxnDelete,
    TxnOp,
    TxnPut,
)

INCLUDABLE = frozenset({"expire", "evict"})
"""Changes that a watch gets only if it asks for them."""

MAX_KNOWN_PATHS = 4096

_texts = ListDecoder(str)
_payloads = ListDecoder(bytes)
_checks = ListDecoder(TxnCheck)
_ops = ListDecoder(TxnOp)


# -- streams ---------------------------------------------------------------------------------------


def publish_of(path: Path, body: PublishBody) -> Publish:
    if body.payload is None:
        raise InvalidArgument("payload is required")
    return Publish(
        path=path,
        payloads=[body.payload],
        invalidate=_targets(body.invalidate),
        producer_id=_producer(body.producer_id),
        sequence=body.sequence,
    )


def publish_batch_of(path: Path, body: PublishBatchBody) -> Publish:
    if is_absent(body.payloads):
        raise InvalidArgument("payloads is required")
    payloads = _payloads.decode(body.payloads, "payloads")
    return Publish(
        path=path,
        payloads=payloads,
        invalidate=_targets(body.invalidate),
        producer_id=_producer(body.producer_id),
        sequence=body.sequence,
    )


def _producer(raw: str | None) -> str:
    return "" if raw is None else clean_name(raw, "producer_id")


def _targets(raw: msgspec.Raw) -> list[tuple[str, str]]:
    if is_absent(raw):
        return []
    return [_target(text) for text in _texts.decode(raw, "invalidate")]


def invalidated_caches(raw: msgspec.Raw) -> list[str]:
    """Returns the names of the caches in which a publish removes keys."""
    return [cache for cache, _ in _targets(raw)]


def _target(text: str) -> tuple[str, str]:
    parts = text.split(":", 2)
    if len(parts) < 3 or parts[0] != "cache":
        raise InvalidArgument("invalidate takes texts of the form cache:<cache>:<key>")
    return clean_name(parts[1], "the cache to invalidate"), parts[2]


def subscribe_of(
    path: Path,
    event_queue_depth: int | None,
    wants_lag: bool | None,
    start: Start | None = None,
    stream_id: int | None = None,
) -> Subscribe:
    check_stream_id(stream_id)
    return Subscribe(
        path=path,
        event_queue_depth=event_queue_depth,
        wants_lag=wants_lag or False,
        start=start,
        stream_id=stream_id,
    )


def named_of(
    path: Path,
    name: str,
    owner: str | None,
    start: Start | None,
    lease_ms: int | None,
    prefetch: int | None,
    stream_id: int | None = None,
) -> SubscribeNamed:
    check_stream_id(stream_id)
    return SubscribeNamed(
        path=path,
        name=clean_name(name, "name"),
        owner=secrets.token_hex(8) if owner is None else clean_name(owner, "owner"),
        start=start or Start("latest"),
        lease_ms=check_number("lease_ms", lease_ms or 0, 0, MAX_LEASE_MS),
        prefetch=check_number("prefetch", prefetch or 0),
        stream_id=stream_id,
    )


def subscription_of(path: Path, message: SubscribeMessage) -> Subscribe | SubscribeNamed:
    start = start_of(message.start)
    if message.name is None:
        check_unnamed(owner=message.owner, lease_ms=message.lease_ms, prefetch=message.prefetch)
        return subscribe_of(path, message.event_queue_depth, message.lag, start, message.stream_id)
    return named_of(
        path,
        message.name,
        message.owner,
        start,
        message.lease_ms,
        message.prefetch,
        message.stream_id,
    )


def check_stream_id(stream_id: int | None) -> None:
    if stream_id is not None:
        check_number("stream_id", stream_id, 0, MAX_POSITION)


def check_unnamed(**given: str | int | None) -> None:
    """Refuses members that only a named subscription has. Without a name they would be ignored,
    and events that are never acked would not come again."""
    wrong = [member for member, value in given.items() if value is not None]
    if wrong:
        raise InvalidArgument(
            f"{wrong[0]} needs a name: only a named subscription has owners, leases and a prefetch"
        )


def start_of(raw: str | int | None) -> Start | None:
    """Reads where a subscription begins: latest, earliest, an offset, or a time."""
    if raw is None or raw == "":
        return None
    text = str(raw).strip()
    if text == "latest":
        return Start("latest")
    if text == "earliest":
        return Start("earliest")
    if text.isascii() and text.isdigit() and int(text) <= MAX_OFFSET:
        return Start("offset", int(text))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None or time.timestamp() < 0:
        raise InvalidArgument(
            "start must be latest, earliest, an offset, or a time with its zone, such as "
            "2026-01-31T12:00:00Z"
        )
    return Start("time", int(time.timestamp() * 1000))


def delivery_of(
    engine: Engine,
    path: Path,
    name: str | None,
    owner: str | None,
    offset: int | None,
    delivery_id: str | None,
) -> Settle:
    """Returns the delivery of a named subscription that is to be settled."""
    check_offset(offset)
    name, owner = clean_name(name, "name"), clean_name(owner, "owner")
    return Settle(engine.streams.log_name(path), name, 0, offset or 0, owner, delivery_id or "")


def lease_of(lease_ms: int | None, default_ms: int) -> int:
    if lease_ms is None:
        return default_ms
    return check_number("lease_ms", lease_ms, 0, MAX_LEASE_MS) or default_ms


def check_offset(offset: int | None) -> None:
    if offset is None:
        raise InvalidArgument("offset is required")
    check_number("offset", offset)


def clean_reason(raw: str | None) -> str:
    """Trims the reason, and cuts it to what is worth keeping in memory."""
    text = (raw or "").strip()
    if len(text) * 4 > MAX_REASON_BYTES:
        text = text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
    return text


# -- the cache -------------------------------------------------------------------------------------


def put_of(path: Path, key: str | None, body: PutBody, only_if: Precondition | None = None) -> Put:
    if body.value is None:
        raise InvalidArgument("value is required")
    return Put(
        path,
        key or "",
        body.value,
        None if body.ttl_ms is None else ttl_of(body.ttl_ms),
        body.if_not_exists or False,
        None if body.if_version is None else version_of(body.if_version, "if_version"),
        only_if,
    )


def increment_of(
    path: Path,
    key: str | None,
    delta: int | None,
    ttl_ms: int | None,
    only_if: Precondition | None = None,
) -> Increment:
    return Increment(path, key or "", 1 if delta is None else delta, ttl_of(ttl_ms), only_if)


def keys_of(body: GetManyBody) -> list[str]:
    if is_absent(body.keys):
        raise InvalidArgument("keys is required")
    return _texts.decode(body.keys, "keys")


def txn_of(path: Path, body: TxnBody) -> Txn:
    if is_absent(body.ops):
        raise InvalidArgument("ops is required")
    checks = [] if is_absent(body.checks) else _checks.decode(body.checks, "checks")
    return Txn(
        [_check_of(path, check) for check in checks],
        [_op_of(path, op) for op in _ops.decode(body.ops, "ops")],
    )


def _check_of(path: Path, check: TxnCheck) -> Check:
    if not check.key:
        raise InvalidArgument("key is required")
    check_key(check.key)
    if (check.version is None) == (check.exists is None):
        raise InvalidArgument("a check has either version or exists")
    version = version_of(check.version, "version")
    return Check(_sibling(path, check.cache), check.key, version, check.exists)


def _op_of(path: Path, op: TxnOp) -> Put | Delete | Increment:
    path = _sibling(path, op.cache)
    if isinstance(op, TxnPut):
        if op.value is None:
            raise InvalidArgument("value is required")
        return Put(path, op.key or "", op.value, ttl_of(op.ttl_ms))
    if isinstance(op, TxnDelete):
        return Delete(path, op.key or "")
    return increment_of(path, op.key, op.delta, op.ttl_ms)


def watch_of(
    path: Path,
    key: str | None,
    prefix: str | None,
    include: list[str],
    since_version: int | None,
) -> Watch:
    if (key is None) == (prefix is None):
        raise InvalidArgument("watch either a key or a prefix; the prefix '' is every key")
    if prefix:
        check_key(prefix)
    if not INCLUDABLE.issuperset(include):
        raise InvalidArgument("include takes expire and evict")
    return Watch(
        path=path,
        key=key,
        prefix=prefix,
        include=frozenset(include),
        since_version=version_of(since_version, "since_version"),
    )


def include_of(raw: msgspec.Raw) -> list[str]:
    return [] if is_absent(raw) else _texts.decode(raw, "include")


# -- names and numbers -----------------------------------------------------------------------------

_paths: dict[tuple[str | None, str | None, str | None], Path] = {}


def path_of(tenant_id: str | None, namespace: str | None, name: str | None, what: str) -> Path:
    """The path of a stream or cache, cleaned. Paths are remembered, since most are the same few."""
    found = _paths.get((tenant_id, namespace, name))
    return found or _clean_path(tenant_id, namespace, name, what)


def _clean_path(tenant_id: str | None, namespace: str | None, name: str | None, what: str) -> Path:
    path = (
        clean_name(tenant_id, "tenant_id"),
        clean_name(namespace, "namespace"),
        clean_name(name, what),
    )
    # Names that had to be trimmed may be of any size, and are not remembered.
    if path == (tenant_id, namespace, name):
        if len(_paths) >= MAX_KNOWN_PATHS:
            _paths.clear()
        _paths[path] = path
    return path


def ttl_of(ttl_ms: int | None) -> int | None:
    return None if ttl_ms is None else check_number("ttl_ms", ttl_ms)


def version_of(version: int | None, name: str) -> int | None:
    return None if version is None else check_number(name, version)


def is_absent(raw: msgspec.Raw) -> bool:
    return not raw or (len(raw) == 4 and bytes(raw) == b"null")


def _sibling(path: Path, cache: str | None) -> Path:
    """The path of another cache of the same namespace, if one is named."""
    return path if cache is None else (path[0], path[1], clean_name(cache, "cache"))
