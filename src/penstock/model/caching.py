"""The cache as commands and answers.

`ttl_ms` None is for ever, 0 is over at once. A version counts a cache's changes and never goes
back; 0 is that of nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.model.tenancy import Path

WatchKind = Literal["put", "delete", "expire", "evict", "gap"]


class Precondition(msgspec.Struct, frozen=True, gc=False):
    """What must hold of a key, as the headers If-Match and If-None-Match say it: versions of which
    the key has one, or has none. An empty set is any version; None is no condition."""

    if_match: frozenset[int] | None = None
    if_none_match: frozenset[int] | None = None

    def is_matched(self, version: int) -> bool:
        """By the version of the key's value, 0 where there is none."""
        return self.if_match is None or _has(self.if_match, version)

    def is_excluded(self, version: int) -> bool:
        return self.if_none_match is not None and _has(self.if_none_match, version)


def _has(versions: frozenset[int], version: int) -> bool:
    return version > 0 and (not versions or version in versions)


class Put(msgspec.Struct, frozen=True, gc=False):
    """`if_version` None: whatever is there."""

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
    """`ttl_ms` is that of a counter which this creates; an existing one keeps its own."""

    path: Path
    key: str
    delta: int = 1
    ttl_ms: int | None = None
    only_if: Precondition | None = None


class Check(msgspec.Struct, frozen=True, gc=False):
    """What must hold for a transaction; a `version` of 0 means absent, as `exists` False does."""

    path: Path
    key: str
    version: int | None = None
    exists: bool | None = None


class Txn(msgspec.Struct, frozen=True):
    """All of `ops`, or nothing when one of `checks` fails. All paths are of one namespace."""

    checks: list[Check]
    ops: list[Put | Delete | Increment]


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """Of one `key`, or of all that begin with `prefix`; the other is None."""

    path: Path
    key: str | None = None
    prefix: str | None = None
    include: frozenset[str] = frozenset()
    since_version: int | None = None


class CacheValue(msgspec.Struct, frozen=True, gc=False):
    """`ttl_ms` is what is left, None for ever."""

    value: bytes
    version: int
    ttl_ms: int | None = None


class Written(msgspec.Struct, frozen=True, gc=False):
    """What an operation came to. `deleted` only of a delete, `number` only of an increment."""

    version: int
    deleted: bool | None = None
    number: int | None = None


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """`from_version` only of a gap: changes after it and up to `version` may be missing."""

    event: WatchKind
    version: int
    key: str = ""
    value: bytes | None = None
    from_version: int = 0
