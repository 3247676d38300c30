"""Cache commands and results.

A `ttl_ms` of None means for ever; 0 means that the entry expires at once. A version counts the
changes of a cache and never goes back; a key without a value has version 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.tenancy import Path

WatchKind = Literal["put", "delete", "expire", "evict", "gap"]


class Precondition(msgspec.Struct, frozen=True, gc=False):
    """A condition on a key's version, as in the headers If-Match and If-None-Match: the key must
    have one of these versions, or none of them. An empty set means any version; None means no
    condition."""

    if_match: frozenset[int] | None = None
    if_none_match: frozenset[int] | None = None

    def is_matched(self, version: int) -> bool:
        """Returns whether `if_match` holds. `version` is that of the key's value, 0 if it has
        none."""
        return self.if_match is None or _has(self.if_match, version)

    def is_excluded(self, version: int) -> bool:
        return self.if_none_match is not None and _has(self.if_none_match, version)


def _has(versions: frozenset[int], version: int) -> bool:
    return version > 0 and (not versions or version in versions)


class Put(msgspec.Struct, frozen=True, gc=False):
    """Stores a value. An `if_version` of None is no condition."""

    path: Path
    key: str
    value: bytes
    ttl_ms: int | None = None
    if_not_exists: bool = False
    if_version: int | None = None
    only_if: Precondition | None = None


class Delete(msgspec.Struct, frozen=True, gc=False):
    path: Path
    key: str
    if_version: int | None = None
    only_if: Precondition | None = None


class Increment(msgspec.Struct, frozen=True, gc=False):
    """Adds `delta` to a counter. `ttl_ms` is for a new counter; an existing one keeps its TTL."""

    path: Path
    key: str
    delta: int = 1
    ttl_ms: int | None = None
    only_if: Precondition | None = None


class Check(msgspec.Struct, frozen=True, gc=False):
    """A condition of a transaction. A `version` of 0 means that the key must not exist, as does
    `exists` False."""

    path: Path
    key: str
    version: int | None = None
    exists: bool | None = None


class Txn(msgspec.Struct, frozen=True):
    """Does all of `ops`, or nothing if one of `checks` fails. All paths are in one namespace."""

    checks: list[Check]
    ops: list[Put | Delete | Increment]


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Watches one `key`, or all keys that begin with `prefix`; the other is None."""

    path: Path
    key: str | None = None
    prefix: str | None = None
    include: frozenset[str] = frozenset()
    since_version: int | None = None


class CacheValue(msgspec.Struct, frozen=True, gc=False):
    """`ttl_ms` is the time left, None for ever."""

    value: bytes
    version: int
    ttl_ms: int | None = None


class Written(msgspec.Struct, frozen=True, gc=False):
    """The result of an operation. `deleted` is set by a delete, `number` by an increment."""

    version: int
    deleted: bool | None = None
    number: int | None = None


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """A change of a watched key. In a gap, changes after `from_version` and up to `version` may be
    missing."""

    event: WatchKind
    version: int
    key: str = ""
    value: bytes | None = None
    from_version: int = 0
