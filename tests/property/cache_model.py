"""Caches as plain dictionaries: what a client may expect of each command, and of each event.

The model knows the promises and no rule of how they are kept: which entry is evicted, and when an
expired one is noticed, it learns from the events, and judges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.cache import entry_bytes
from penstock.model.caching import Check, Delete, Increment, Put, WatchEvent, Written
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    PenstockError,
    VersionMismatch,
)
from penstock.model.tenancy import CacheConfig, Path


@dataclass(frozen=True)
class Held:
    value: bytes
    version: int
    expires: int | None


@dataclass
class CacheModel:
    """`used` tells in which order the keys were last used; `log` has every event since the broker
    started."""

    config: CacheConfig
    version: int
    entries: dict[str, Held] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    log: list[WatchEvent] = field(default_factory=list)
    ticks: int = 0

    def live(self, key: str, now: int) -> Held | None:
        held = self.entries.get(key)
        return None if held is None or is_over(held, now) else held

    def use(self, key: str) -> None:
        self.ticks += 1
        self.used[key] = self.ticks

    def size(self, entries: dict[str, Held] | None = None) -> int:
        held = self.entries if entries is None else entries
        return sum(entry_bytes(key, each.value) for key, each in held.items())

    def fits(self, entries: dict[str, Held]) -> bool:
        config = self.config
        return not (0 < config.max_entries < len(entries)) and not (
            0 < config.max_bytes < self.size(entries)
        )

    def restarted(self) -> None:
        """What is durable is there; of its use only the writes are known."""
        self.log = []
        if not self.config.durable:
            self.entries = {}
        self.used = {key: held.version for key, held in self.entries.items()}
        self.ticks = self.version


def is_over(held: Held, now: int) -> bool:
    return held.expires is not None and held.expires <= now


Caches = dict[Path, CacheModel]
Op = Put | Delete | Increment


@dataclass
class Expected:
    """What ops must come to: `written` without versions, or `error`; `expires` by (cache, key)."""

    written: list[Written] = field(default_factory=list)
    error: type[PenstockError] | None = None
    expires: dict[tuple[Path, str], int | None] = field(default_factory=dict)
    changed: dict[Path, set[str]] = field(default_factory=dict)


def foresee(caches: Caches, ops: list[Op], checks: list[Check], now: int) -> Expected:
    """Does the ops on copies of the dictionaries, one after the other."""
    seen = {
        path: {key: held for key in cache.entries if (held := cache.live(key, now)) is not None}
        for path, cache in caches.items()
    }
    expected = Expected()
    try:
        for check in checks:
            _foresee_check(seen[check.path].get(check.key), check)
        for op in ops:
            expected.written.append(_foresee_op(seen[op.path], op, now, expected))
    except PenstockError as error:
        return Expected(error=type(error))
    return expected


def _foresee_check(held: Held | None, check: Check) -> None:
    if check.version is not None and (held.version if held else 0) != check.version:
        raise VersionMismatch("")
    if check.exists is not None and check.exists != (held is not None):
        raise VersionMismatch("")


def _foresee_op(entries: dict[str, Held], op: Op, now: int, expected: Expected) -> Written:
    held = entries.get(op.key)
    if_version = None if isinstance(op, Increment) else op.if_version
    if isinstance(op, Put) and op.if_not_exists and held is not None:
        raise AlreadyExists("")
    if if_version is not None and (held.version if held else 0) != if_version:
        raise VersionMismatch("")
    if isinstance(op, Delete):
        entries.pop(op.key, None)
        return Written(0, deleted=held is not None)
    if isinstance(op, Increment) and held is not None:
        try:
            number: int | None = int(held.value) + op.delta
        except ValueError:
            raise FailedPrecondition("") from None
        expires = held.expires
    else:
        number = op.delta if isinstance(op, Increment) else None
        expires = None if op.ttl_ms is None else now + op.ttl_ms
    value = op.value if isinstance(op, Put) else b"%d" % (number or 0)
    new = Held(value, -1, expires)
    expected.expires[op.path, op.key] = expires
    expected.changed.setdefault(op.path, set()).add(op.key)
    if expires is not None and expires <= now:
        entries.pop(op.key, None)
    else:
        entries[op.key] = new
    return Written(0, number=number)


@dataclass
class Gone:
    """What expired or was evicted by a command, and what there was before the last eviction."""

    nbytes: int = 0
    before_last: dict[str, Held] | None = None


def happened(cache: CacheModel, events: list[WatchEvent], now: int, changed: set[str]) -> Gone:
    """Takes over what a watch of everything saw of one command, and judges each event."""
    gone = Gone()
    for event in events:
        assert event.event != "gap"
        assert event.version == cache.version + 1, "a version is skipped or used twice"
        cache.version = event.version
        cache.log.append(event)
        held = cache.entries.get(event.key)
        if event.event == "put":
            assert event.value is not None
            expires = held.expires if held is not None else None
            cache.entries[event.key] = Held(event.value, event.version, expires)
            cache.use(event.key)
            continue
        assert held is not None, f"{event.event} of what was not there"
        if event.event == "expire":
            assert is_over(held, now) or event.key in changed, "expired before its time"
        elif event.event == "evict":
            assert event.key not in changed, "a command evicted what it wrote"
            assert not is_over(held, now), "what has expired is not evicted"
            gone.before_last = dict(cache.entries)
            if cache.config.eviction_policy == "lru":
                _judge_order(cache, event.key, changed)
        if event.event != "delete":
            gone.nbytes += entry_bytes(event.key, held.value)
        del cache.entries[event.key]
    return gone


def _judge_order(cache: CacheModel, victim: str, changed: set[str]) -> None:
    """felix-74."""
    others = cache.entries.keys() - changed - {victim}
    before = [key for key in others if cache.used[key] < cache.used[victim]]
    assert not before, f"{before} were used less recently than {victim!r}"
