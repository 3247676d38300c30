"""The calls that read and write the entries of a cache. No IO.

The first argument is the cache's path; the handles of both clients add it. Calls on the cache
itself, such as its settings, are in `registry`. A version counts the changes of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from penstock.client.calls import (
    Call,
    Payload,
    SocketForm,
    bytes_of,
    encode,
    escaped,
    list_of,
    query_of,
    reader,
)
from penstock.client.lines import LineBuffer
from penstock.client.registry import cache_path
from penstock.model.caching import CacheValue, Written
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    VersionMismatch,
)
from penstock.model.tenancy import Path

# -- transactions --------------------------------------------------------------------------------


class CacheCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """A condition on a key: that it has this `version`, or that it `exists` or not. `cache` names
    another cache of the namespace."""

    key: str
    version: int | None = None
    exists: bool | None = None
    cache: str | None = None


class CacheOp(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="op"):
    """A step of a transaction: a put, a delete or an increment."""

    key: str


class CachePut(CacheOp, frozen=True, tag="put"):
    value: Payload
    ttl_ms: int | None = None
    cache: str | None = None


class CacheDelete(CacheOp, frozen=True, tag="delete"):
    cache: str | None = None


class CacheIncr(CacheOp, frozen=True, tag="incr"):
    """Adds to a counter. `ttl_ms` applies only to a counter that this step creates."""

    delta: int = 1
    ttl_ms: int | None = None
    cache: str | None = None


# -- operations ----------------------------------------------------------------------------------


def get(path: Path, key: str) -> Call[CacheValue | None]:
    """Returns the value under a key with its version and remaining time; None if there is none."""
    form = SocketForm("cache_get", cache_members(path) | {"key": key}, is_read=True)
    return Call("GET", _entry(path, key), _value, form=form)


def get_many(path: Path, keys: Iterable[str]) -> Call[dict[str, CacheValue]]:
    """Returns the values under these keys, all read at the same moment. Leaves out keys without a
    value, and does not tell the remaining time."""
    body = encode({"keys": list_of(keys, "keys")})
    form = SocketForm("cache_get_many", cache_members(path), is_read=True)
    return Call("POST", f"{cache_path(*path)}/get_many", _values, body, form=form)


def put(
    path: Path,
    key: str,
    value: Payload,
    *,
    ttl_ms: int | None = None,
    if_not_exists: bool = False,
    if_version: int | None = None,
) -> Call[int]:
    """Puts a value under a key and returns its version. Without `ttl_ms` it does not expire.

    Raises AlreadyExists if there is a value and `if_not_exists` is set, and VersionMismatch if the
    key's version is not `if_version`. A key without a value has version 0.
    """
    body = {
        "value": bytes_of(value),
        "ttl_ms": ttl_ms,
        "if_not_exists": if_not_exists,
        "if_version": if_version,
    }
    form = SocketForm("cache_put", cache_members(path) | {"key": key}, refusal=_mismatch)
    read = reader(Written)
    return Call("PUT", _entry(path, key), lambda data: read(data).version, encode(body), form=form)


def delete(path: Path, key: str, *, if_version: int | None = None) -> Call[bool]:
    """Deletes the value under a key. Returns whether there was one. Raises VersionMismatch as `put`
    does."""
    query = query_of(if_version=if_version)
    members = cache_members(path) | {"key": key, "if_version": if_version}
    read = reader(Written)
    return Call(
        "DELETE",
        f"{_entry(path, key)}?{query}" if query else _entry(path, key),
        lambda body: bool(read(body).deleted),
        form=SocketForm("cache_delete", members, refusal=_mismatch),
    )


def incr(path: Path, key: str, delta: int = 1, *, ttl_ms: int | None = None) -> Call[int]:
    """Adds to a counter and returns its new value. A missing counter begins at 0 and expires after
    `ttl_ms`; later increments do not change that time. Raises FailedPrecondition if the value is no
    number."""
    read = reader(_Counter)
    body = encode({"delta": delta, "ttl_ms": ttl_ms})
    form = SocketForm("cache_incr", cache_members(path) | {"key": key})
    url_path = f"{_entry(path, key)}/incr"
    return Call("POST", url_path, lambda data: read(data).number, body, form=form)


def txn(path: Path, checks: Iterable[CacheCheck], ops: Iterable[CacheOp]) -> Call[list[Written]]:
    """Executes all of `ops`, or none of them: raises VersionMismatch if one of `checks` does not
    hold. Returns the result of each step, in order."""
    body = encode({"checks": list(checks), "ops": [_encodable(op) for op in ops]})
    form = SocketForm("cache_txn", cache_members(path), refusal=_mismatch)
    read = reader(_TxnResults)
    url_path = f"{cache_path(*path)}/txn"
    return Call("POST", url_path, lambda data: read(data).results, body, form=form)


def watch_path(
    path: Path,
    key: str | None,
    prefix: str | None,
    include: Iterable[str],
    since_version: int | None,
    heartbeat_ms: int,
) -> str:
    """Returns the address of a watch."""
    query = query_of(
        key=key,
        prefix=prefix,
        include=",".join(list_of(include, "include")) or None,
        since_version=since_version,
        heartbeat_ms=heartbeat_ms,
    )
    return f"{cache_path(*path)}/watch?{query}"


class CachedEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry of a snapshot. `expires_at` is None if it does not expire."""

    key: str
    value: bytes
    version: int
    expires_at: datetime | None = None


def entries_path(path: Path) -> str:
    """Returns the address of all entries, as lines."""
    return f"{cache_path(*path)}/entries?format=ndjson"


_decode_entries = msgspec.json.Decoder(CachedEntry).decode_lines


class EntryBuffer(LineBuffer[CachedEntry]):
    def _read(self, lines: bytes) -> Iterable[CachedEntry]:
        return _decode_entries(lines)


# -- answers -------------------------------------------------------------------------------------


class _Value(msgspec.Struct):
    value: bytes | None
    version: int
    ttl_ms: int | None = None
    key: str = ""


class _Values(msgspec.Struct):
    values: list[_Value]


class _Counter(msgspec.Struct):
    number: int


class _TxnResults(msgspec.Struct):
    results: list[Written]


def _value(body: bytes) -> CacheValue | None:
    found = reader(_Value)(body)
    if found.value is None:
        return None
    return CacheValue(found.value, found.version, found.ttl_ms)


def _values(body: bytes) -> dict[str, CacheValue]:
    return {
        each.key: CacheValue(each.value, each.version)
        for each in reader(_Values)(body).values
        if each.value is not None
    }


_OF_COUNTERS = ("is not a number", "would leave the range")


def _mismatch(error: PenstockError) -> PenstockError:
    """Returns VersionMismatch for a condition that does not hold. Over HTTP the status tells it
    from a counter that cannot be incremented; a message has only the text."""
    if type(error) is not FailedPrecondition or any(t in error.message for t in _OF_COUNTERS):
        return error
    return VersionMismatch(error.message)


# -- requests ------------------------------------------------------------------------------------


def cache_members(path: Path) -> dict[str, Any]:
    """Returns the members of a message that name a cache."""
    tenant_id, namespace, cache = path
    return {"tenant_id": tenant_id, "namespace": namespace, "cache": cache}


def _entry(path: Path, key: str) -> str:
    if not key:
        raise InvalidArgument("a key is required")
    return f"{cache_path(*path)}/entries/{escaped(key)}"


def _encodable(op: CacheOp) -> CacheOp:
    """Returns the step with its value as bytes, which the encoder writes as base64."""
    if isinstance(op, CachePut):
        return msgspec.structs.replace(op, value=bytes_of(op.value))
    return op
