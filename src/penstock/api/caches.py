"""Caches: reading, writing and watching entries, and the checks of keys and preconditions."""

from __future__ import annotations

import re
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.api.ranges import Range
from penstock.model.caching import (
    CacheValue,
    Delete,
    Increment,
    Precondition,
    Put,
    Txn,
    Watch,
    WatchEvent,
    Written,
)
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge, VersionMismatch
from penstock.model.limits import MAX_CACHE_KEY_BYTES
from penstock.model.ranges import RangeFormat
from penstock.model.tenancy import Path

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class WatchSink(Protocol):
    """The receiving end of a watch."""

    def wake(self) -> None:
        """Called when events can be taken and there were none before, then not again until all are
        taken."""
        ...

    def ended(self, error: PenstockError) -> None:
        """Called when the broker ends the watch: its cache was deleted, or the log has failed."""
        ...


class WatchHandle(Protocol):
    """An open watch. `version` is the cache's when the watch began: every later change is seen, or
    lies in a gap."""

    id: str
    version: int

    def take(self, max_events: int) -> list[WatchEvent]: ...

    def close(self) -> None: ...


class CachesPart(Protocol):
    def get(self, path: Path, key: str, done: Done[CacheValue | None]) -> None: ...

    def get_many(self, path: Path, keys: list[str], done: Done[list[CacheValue | None]]) -> None:
        """Gives the values in the order of `keys`, all as of one moment."""
        ...

    def put(self, command: Put, done: Done[Written]) -> None: ...

    def delete(self, command: Delete, done: Done[Written]) -> None:
        """Deletes a value. Gives the new version, or 0 if there was nothing to delete."""
        ...

    def increment(self, command: Increment, done: Done[Written]) -> None: ...

    def transact(self, command: Txn, done: Done[list[Written]]) -> None:
        """Gives one result for each op."""
        ...

    def entries(
        self, path: Path, columns: tuple[str, ...], form: RangeFormat, done: Done[Range]
    ) -> None:
        """Gives all entries as of one moment, without the order or the counters of reads. Entries
        that expire before they are read are left out. No columns means all."""
        ...

    def watch(self, command: Watch, sink: WatchSink, done: Done[WatchHandle]) -> None: ...

    def size(self, path: Path, done: Done[tuple[int, int]]) -> None:
        """Gives the number of entries and their bytes. Expired entries count until they are
        removed."""
        ...


def check_key(key: str) -> None:
    """Refuses an invalid key."""
    if not key:
        raise InvalidArgument("key is required")
    size = len(key) if key.isascii() else len(key.encode())
    if size > MAX_CACHE_KEY_BYTES:
        raise TooLarge(f"key is longer than {MAX_CACHE_KEY_BYTES} bytes")
    if not key.isprintable() and _CONTROL.search(key):
        raise InvalidArgument("key has control characters in it")


def check_precondition(key: str, version: int, only_if: Precondition | None) -> None:
    """Raises VersionMismatch if the precondition fails for a key of this version. Version 0 means
    that the key has no value."""
    if only_if is None:
        return
    if not only_if.is_matched(version):
        has = f"has version {version}, which If-Match does not name"
        needs = "has no value, and If-Match asks for one"
        raise VersionMismatch(f"key {key!r} {has if version else needs}")
    if only_if.is_excluded(version):
        raise VersionMismatch(f"key {key!r} has version {version}, which If-None-Match excludes")
