"""Rules of caches: turns a command into records of what is stored and removed, or refuses it.

Deciding changes nothing. A draft shows a cache as it would be with the records decided so far, so
that the operations of a transaction see each other. Invariant: with the records applied, no cache
exceeds its own bounds and all together stay within `cache_memory_bytes`. A decision does not evict
what it writes. Must not know which records become durable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from penstock.api.caches import check_key, check_precondition
from penstock.core.cache import Cache, CacheEntry, entry_bytes
from penstock.core.state import BrokerState
from penstock.core.tenancy import find
from penstock.model.caching import Check, Delete, Increment, Put, Txn, Written
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    TooLarge,
    VersionMismatch,
)
from penstock.model.limits import MAX_OFFSET, MAX_TXN_OPS
from penstock.model.records import DELETED, EVICTED, EXPIRED, CacheRemoved, CacheStored
from penstock.model.scopes import Scope
from penstock.model.tenancy import Path

T = TypeVar("T")

_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_INT64 = range(-(2**63), 2**63)


Held = CacheEntry | CacheStored
"""The value of a key: from before, or from a record of the same decision."""


class Draft:
    """One cache as it would be. `written` has the keys that were decided; None means removed."""

    __slots__ = ("bytes", "cache", "count", "now_ms", "records", "version", "written")

    def __init__(
        self, cache: Cache, now_ms: int, records: list[CacheStored | CacheRemoved]
    ) -> None:
        self.cache = cache
        self.now_ms = now_ms
        self.records = records
        self.version = cache.version
        self.count = len(cache.entries)
        self.bytes = cache.bytes
        self.written: dict[str, CacheStored | None] = {}

    def see(self, key: str) -> Held | None:
        """Returns the key's value, or None. Removes it, with a record, if it has expired."""
        entry: Held | None
        if key in self.written:
            entry = self.written[key]
            is_over = entry is not None and 0 < entry.expires <= self.now_ms
        else:
            entry = self.cache.entries.get(key)
            is_over = entry is not None and self.cache.is_over(key, entry, self.now_ms)
        if entry is not None and is_over:
            self.remove(key, entry, EXPIRED)
            return None
        return entry

    def store(self, key: str, value: bytes, expires: int, old: Held | None) -> CacheStored:
        """Stores a value. `old` is the result of `see`."""
        self.version = version = self.version + 1
        record = CacheStored(self.cache.id, self.now_ms, key, value, version, expires)
        self.records.append(record)
        self.written[key] = record
        if old is None:
            self.count += 1
            self.bytes += entry_bytes(key, value)
        else:
            self.bytes += len(value) - len(old.value)
        return record

    def remove(self, key: str, entry: Held, how: int) -> int:
        self.version = version = self.version + 1
        self.records.append(CacheRemoved(self.cache.id, self.now_ms, key, version, how))
        self.written[key] = None
        self.count -= 1
        self.bytes -= entry_bytes(key, entry.value)
        return version

    def keep_within(self, max_entries: int, max_bytes: int) -> bool:
        """Evicts entries until the cache is within the bounds. Returns False if what was written
        exceeds them by itself."""
        if self.count <= max_entries and self.bytes <= max_bytes:
            return True
        cache = self.cache
        for key, entry in cache.entries.items():
            if key not in self.written:
                is_over = cache.is_over(key, entry, self.now_ms)
                self.remove(key, entry, EXPIRED if is_over else EVICTED)
                if self.count <= max_entries and self.bytes <= max_bytes:
                    return True
        return False


class Decision(Generic[T]):
    """The records of one command, in order, and its outcome. `anew` are the records that set or
    clear a TTL; an increment of an existing key keeps its TTL."""

    outcome: T

    __slots__ = ("_drafts", "_state", "anew", "is_durable", "now_ms", "outcome", "records")

    def __init__(self, state: BrokerState, now_ms: int) -> None:
        self._state = state
        self._drafts: dict[int, Draft] = {}
        self.now_ms = now_ms
        self.records: list[CacheStored | CacheRemoved] = []
        self.anew: list[CacheStored] = []
        self.is_durable = False

    def draft(self, cache: Cache) -> Draft:
        draft = self._drafts.get(cache.id)
        if draft is None:
            draft = self._drafts[cache.id] = Draft(cache, self.now_ms, self.records)
            if cache.is_durable:
                self.is_durable = True
        return draft

    def finish(self) -> Decision[T]:
        """Evicts entries to make room for the records."""
        memory, limit = self._state.cache_memory, self._state.limits.cache_memory_bytes
        total = memory.bytes
        for draft in self._drafts.values():
            cache = draft.cache
            if not draft.keep_within(cache.max_entries, cache.max_bytes):
                raise TooLarge(_too_much(cache))
            total += draft.bytes - cache.bytes
        if total > limit:
            self._relieve(total - limit)
        return self

    def growth(self, *, durable_only: bool = False) -> dict[Scope, int]:
        """Returns by how many bytes the caches, or durable caches, of each namespace grow."""
        grown: defaultdict[Scope, int] = defaultdict(int)
        for draft in self._drafts.values():
            if draft.cache.is_durable or not durable_only:
                grown[draft.cache.path[:2]] += draft.bytes - draft.cache.bytes
        return grown

    def _relieve(self, excess: int) -> None:
        """Evicts from the largest cache, because all caches together take too much."""
        for cache in self._state.cache_memory.largest_first(self._state.caches):
            draft = self.draft(cache)
            before = draft.bytes
            draft.keep_within(cache.max_entries, max(0, before - excess))
            excess -= before - draft.bytes
            if excess <= 0:
                return
        raise TooLarge(
            "the change needs more memory than all caches together may use: cache_memory_bytes is "
            f"{self._state.limits.cache_memory_bytes}"
        )


def find_cache(state: BrokerState, path: Path) -> Cache:
    entry = state.registry.caches.get(path)
    if entry is None:
        entry = find(state.registry, "cache", path)
    return state.caches[entry.id]


def decide_put(state: BrokerState, command: Put, now_ms: int) -> Decision[Written]:
    decision: Decision[Written] = Decision(state, now_ms)
    decision.outcome = _put(state, decision, command)
    return decision.finish()


def decide_replace(
    state: BrokerState, cache: Cache, command: Put, now_ms: int
) -> CacheStored | None:
    """Decides the most common put without a draft: replaces a value, with nothing to check and room
    for it. Returns None if `decide_put` is needed."""
    old = cache.entries.get(command.key)
    if old is None or command.if_not_exists or command.if_version is not None:
        return None
    if command.only_if is not None:
        return None
    grown = len(command.value) - len(old.value)
    if grown > 0 and not _has_room(state, cache, command, grown):
        return None
    ttl_ms = command.ttl_ms
    if 0 < old.expires <= now_ms or (ttl_ms is not None and ttl_ms < 0):
        return None
    expires = 0 if ttl_ms is None else min(now_ms + ttl_ms, MAX_OFFSET)
    return CacheStored(cache.id, now_ms, command.key, command.value, cache.version + 1, expires)


def _has_room(state: BrokerState, cache: Cache, command: Put, grown: int) -> bool:
    limits = state.limits
    return (
        len(command.value) <= limits.max_message_bytes
        and cache.bytes + grown <= cache.max_bytes
        and state.cache_memory.bytes + grown <= limits.cache_memory_bytes
    )


def decide_delete(state: BrokerState, command: Delete, now_ms: int) -> Decision[Written]:
    decision: Decision[Written] = Decision(state, now_ms)
    decision.outcome = _delete(state, decision, command)
    return decision


def decide_increment(state: BrokerState, command: Increment, now_ms: int) -> Decision[Written]:
    decision: Decision[Written] = Decision(state, now_ms)
    decision.outcome = _increment(state, decision, command)
    return decision.finish()


def decide_transact(state: BrokerState, command: Txn, now_ms: int) -> Decision[list[Written]]:
    """Decides a transaction. The checks see the state before it; each operation sees the results of
    those before it."""
    _check_shape(command)
    decision: Decision[list[Written]] = Decision(state, now_ms)
    for check in command.checks:
        _check(state, decision, check)
    decision.outcome = [decide_op(state, decision, op) for op in command.ops]
    return decision.finish()


def decide_op(state: BrokerState, decision: Decision[Any], op: Put | Delete | Increment) -> Written:
    """Adds one operation to a decision that has several. `finish` it behind the last."""
    if isinstance(op, Put):
        return _put(state, decision, op)
    if isinstance(op, Delete):
        return _delete(state, decision, op)
    return _increment(state, decision, op)


def decide_look(
    state: BrokerState, cache: Cache, keys: Iterable[str], now_ms: int
) -> Decision[None]:
    """Removes the keys that have expired."""
    decision: Decision[None] = Decision(state, now_ms)
    draft = decision.draft(cache)
    for key in keys:
        draft.see(key)
    return decision


def decide_invalidate(
    state: BrokerState, targets: Iterable[tuple[Path, str]], now_ms: int
) -> Decision[None]:
    """Removes each key from its cache, if it exists."""
    decision: Decision[None] = Decision(state, now_ms)
    for path, key in targets:
        draft = decision.draft(find_cache(state, path))
        entry = draft.see(key)
        if entry is not None:
            draft.remove(key, entry, DELETED)
    return decision


def decide_bounds(state: BrokerState, caches: Iterable[Cache], now_ms: int) -> Decision[None]:
    """Evicts entries of caches whose bounds have become smaller than their content."""
    decision: Decision[None] = Decision(state, now_ms)
    for cache in caches:
        if len(cache.entries) > cache.max_entries or cache.bytes > cache.max_bytes:
            decision.draft(cache)
    return decision.finish()


def _put(state: BrokerState, decision: Decision[Any], command: Put) -> Written:
    draft = decision.draft(find_cache(state, command.path))
    key, value = command.key, command.value
    check_key(key)
    if len(value) > state.limits.max_message_bytes:
        raise TooLarge(
            f"the value has {len(value)} bytes; "
            f"max_message_bytes is {state.limits.max_message_bytes}"
        )
    entry = draft.see(key)
    check_precondition(key, 0 if entry is None else entry.version, command.only_if)
    if entry is not None and command.if_not_exists:
        raise AlreadyExists(f"key {key!r} exists with version {entry.version}")
    if command.if_version is not None:
        _check_version(key, entry, command.if_version)
    return Written(_store(decision, draft, key, value, command.ttl_ms, entry))


def _delete(state: BrokerState, decision: Decision[Any], command: Delete) -> Written:
    draft = decision.draft(find_cache(state, command.path))
    check_key(command.key)
    entry = draft.see(command.key)
    check_precondition(command.key, 0 if entry is None else entry.version, command.only_if)
    if command.if_version is not None:
        _check_version(command.key, entry, command.if_version)
    if entry is None:
        return Written(0, deleted=False)
    return Written(draft.remove(command.key, entry, DELETED), deleted=True)


def _increment(state: BrokerState, decision: Decision[Any], command: Increment) -> Written:
    draft = decision.draft(find_cache(state, command.path))
    key = command.key
    check_key(key)
    entry = draft.see(key)
    check_precondition(key, 0 if entry is None else entry.version, command.only_if)
    number = command.delta if entry is None else _number(key, entry.value) + command.delta
    if number not in _INT64:
        raise FailedPrecondition(f"the counter {key!r} would leave the range of 64 bits")
    text = b"%d" % number
    if entry is None:
        version = _store(decision, draft, key, text, command.ttl_ms, None)
    else:
        version = draft.store(key, text, entry.expires, entry).version
    return Written(version, number=number)


def _store(
    decision: Decision[Any],
    draft: Draft,
    key: str,
    value: bytes,
    ttl_ms: int | None,
    old: Held | None,
) -> int:
    if ttl_ms is None:
        expires = 0
    elif ttl_ms >= 0:
        expires = min(draft.now_ms + ttl_ms, MAX_OFFSET)
    else:
        raise InvalidArgument("ttl_ms must be a whole number, at least 0")
    record = draft.store(key, value, expires, old)
    decision.anew.append(record)
    return record.version


def _check(state: BrokerState, decision: Decision[Any], check: Check) -> None:
    entry = decision.draft(find_cache(state, check.path)).see(check.key)
    if check.version is not None:
        _check_version(check.key, entry, check.version)
    if check.exists is not None and check.exists != (entry is not None):
        raise VersionMismatch(f"key {check.key!r} {'does not exist' if check.exists else 'exists'}")


def _check_version(key: str, entry: Held | None, wanted: int) -> None:
    version = 0 if entry is None else entry.version
    if version != wanted:
        raise VersionMismatch(f"key {key!r} has version {version}, not {wanted}")


def _check_shape(command: Txn) -> None:
    if not command.ops:
        raise InvalidArgument("a transaction needs at least one op")
    if max(len(command.ops), len(command.checks)) > MAX_TXN_OPS:
        raise TooLarge(f"a transaction has at most {MAX_TXN_OPS} ops and as many checks")
    if len({each.path[:2] for each in (*command.checks, *command.ops)}) > 1:
        raise InvalidArgument("all caches of a transaction must be in one namespace")


def _number(key: str, value: bytes) -> int:
    if _NUMBER.fullmatch(value):
        number = int(value)
        if number in _INT64:
            return number
    raise FailedPrecondition(f"the value of {key!r} is not a number")


def _too_much(cache: Cache) -> str:
    name = "/".join(cache.path)
    return f"too large for cache {name!r}: it alone exceeds max_entries or max_bytes"
