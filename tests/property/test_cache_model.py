"""Caches against plain dictionaries: any history of commands, time, restarts and crashes.

After every command the events of a watch of everything must explain what each cache holds, and
what it holds must be what the dictionaries hold. Slow watches are read now and then: what they
were given and their gaps must cover all that happened.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.invariants import check
from penstock.engine.watches import CacheWatch
from penstock.model.caching import (
    CacheValue,
    Check,
    Delete,
    Increment,
    Put,
    Txn,
    WatchEvent,
    Written,
)
from penstock.model.errors import NotFound, PenstockError, TooLarge
from penstock.model.limits import KIB, Limits
from penstock.model.tenancy import CacheConfig, Path
from penstock.storage.log import WalOptions
from tests.engine.cache_harness import CacheBroker, Watcher
from tests.property.cache_model import CacheModel, Expected, Held, Op, foresee, happened
from tests.property.follower import Follower, must_equal, recovered
from tests.property.test_any_history import profile
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

CONFIGS = {
    "plain": CacheConfig(),
    "lru": CacheConfig(max_entries=3, eviction_policy="lru"),
    "kept": CacheConfig(durable=True),
    "tight": CacheConfig(max_bytes=1400, eviction_policy="lru", durable=True),
}
MEMORY_BYTES = 5600
LIMITS = Limits(cache_memory_bytes=MEMORY_BYTES)
OPTIONS = WalOptions(segment_bytes=16 * KIB, reserve_bytes=0, frame_bytes=8 * KIB)
START_MS = 50
"""A start takes time: by the clock the versions of an ephemeral cache go on."""
SLOW_BYTES = 5
"""So that a slow watch overflows within a short history."""
EVERYTHING = frozenset({"expire", "evict"})

caches = st.sampled_from(sorted(CONFIGS))
keys = st.sampled_from(["a", "b", "c", "dé", "e"])
ttls = st.sampled_from([None, None, None, 0, 5, 40, 200])
VALUES = [b"", b"1", b"-7", b"text", b"x" * 200, b"x" * 900, b"x" * 1500]
values = st.integers(0, len(VALUES) - 1)
choice = st.integers(0, 11)


class Slow(Watcher):
    """Takes only when it is told to. `at` is the first event of the log it has not seen."""

    def __init__(self, cache: str, key: str | None, include: frozenset[str]) -> None:
        super().__init__(is_full=True)
        self.cache = cache
        self.key = key
        self.kinds_wanted = {"put", "delete", *include}
        self.at = 0

    def wants(self, event: WatchEvent) -> bool:
        return event.event in self.kinds_wanted and self.key in (None, event.key)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        vfs = FaultyVfs()
        vfs._dsync_flag = 0  # a write and a sync: a crash may come between them
        self.broker = CacheBroker(vfs, limits=LIMITS, options=OPTIONS)
        self.follower = Follower(self.broker)
        self.model: dict[Path, CacheModel] = {}
        self.everything: dict[Path, Watcher] = {}
        self.slow: list[Slow] = []

    @initialize()
    def begin(self) -> None:
        for name in CONFIGS:
            self.make(name)

    @property
    def now(self) -> int:
        return self.broker.clock.now_ms()

    def path(self, name: str) -> Path:
        return ("t", "n", name)

    # -- commands -----------------------------------------------------------------------------

    @rule(name=caches, key=keys, value=values, ttl_ms=ttls, how=choice)
    def put(self, name: str, key: str, value: int, ttl_ms: int | None, how: int) -> None:
        path = self.path(name)
        if_version = {0: 0, 1: self._version(path, key), 2: 17}.get(how)
        op = Put(path, key, VALUES[value], ttl_ms, if_not_exists=how == 3, if_version=if_version)
        self.do(self.broker.engine.caches.put, op, [op])

    @rule(
        name=caches,
        steps=st.lists(st.tuples(keys, values, ttls, st.booleans()), min_size=2, max_size=8),
    )
    def use(self, name: str, steps: list[tuple[str, int, int | None, bool]]) -> None:
        """As a client does: reading and writing, one after the other."""
        for key, value, ttl_ms, is_read in steps:
            if is_read:
                self.get(name, [key])
            else:
                self.put(name, key, value % 5, ttl_ms, 9)

    @rule(name=caches, key=keys, how=choice)
    def delete(self, name: str, key: str, how: int) -> None:
        path = self.path(name)
        op = Delete(path, key, {0: 0, 1: self._version(path, key), 2: 17}.get(how))
        self.do(self.broker.engine.caches.delete, op, [op])

    @rule(name=caches, key=keys, delta=st.integers(-3, 3), ttl_ms=ttls)
    def increment(self, name: str, key: str, delta: int, ttl_ms: int | None) -> None:
        op = Increment(self.path(name), key, delta, ttl_ms)
        self.do(self.broker.engine.caches.increment, op, [op])

    @rule(
        steps=st.lists(st.tuples(caches, keys, values, ttls, choice), min_size=1, max_size=4),
        checked=st.lists(st.tuples(caches, keys, choice), max_size=2),
    )
    def transact(self, steps: list[Any], checked: list[Any]) -> None:
        ops = [self._op(*step) for step in steps]
        checks = [self._check(*each) for each in checked]
        self.do(self.broker.engine.caches.transact, Txn(checks, ops), ops, checks)

    def _op(self, name: str, key: str, value: int, ttl_ms: int | None, how: int) -> Op:
        path = self.path(name)
        if how < 2:
            return Delete(path, key)
        if how < 5:
            return Increment(path, key, how, ttl_ms)
        return Put(path, key, VALUES[value], ttl_ms, if_not_exists=how == 5)

    def _check(self, name: str, key: str, how: int) -> Check:
        path = self.path(name)
        if how % 3 == 0:
            return Check(path, key, exists=how % 2 == 0)
        return Check(path, key, version=self._version(path, key) if how > 2 else 0)

    def _version(self, path: Path, key: str) -> int:
        held = self.model[path].live(key, self.now)
        return held.version if held else 0

    @rule(name=caches, wanted=st.lists(keys, min_size=1, max_size=3))
    def get(self, name: str, wanted: list[str]) -> None:
        path = self.path(name)
        model = self.model[path]
        expected = [self._value(model.live(key, self.now)) for key in wanted]
        if len(wanted) == 1:
            found = [self.broker.value(path, wanted[0])]
        else:
            found = self.broker.must(self.broker.engine.caches.get_many, path, wanted)
        assert found == expected
        for key, value in zip(wanted, expected, strict=True):
            if value is not None and model.config.eviction_policy == "lru":
                model.use(key)
        self.follow({})

    def _value(self, held: Held | None) -> CacheValue | None:
        if held is None:
            return None
        left_ms = None if held.expires is None else held.expires - self.now
        return CacheValue(held.value, held.version, left_ms)

    @rule(name=caches, wanted=st.lists(keys, min_size=1, max_size=2, unique=True))
    def invalidate(self, name: str, wanted: list[str]) -> None:
        path = self.path(name)
        there = [key for key in wanted if self.model[path].live(key, self.now)]
        is_durable = self.broker.engine.caches.invalidate([(path, key) for key in wanted])
        assert is_durable == self.model[path].config.durable
        self.broker.settle()
        log = self.follow({})[path]
        assert [event.key for event in log if event.event == "delete"] == there

    @rule(ms=st.sampled_from([1, 5, 40, 100]))
    def time_passes(self, ms: int) -> None:
        self.broker.pass_ms(ms)

    # -- set-up -------------------------------------------------------------------------------

    @rule(name=caches, entries=st.integers(0, 3), nbytes=st.sampled_from([0, 800, 1400]))
    def configure(self, name: str, entries: int, nbytes: int) -> None:
        path = self.path(name)
        old = self.model[path].config
        config = CacheConfig(
            max_entries=entries,
            max_bytes=nbytes,
            eviction_policy=old.eviction_policy,
            durable=old.durable,
        )
        self.model[path].config = config
        self.broker.configure(
            path,
            max_entries=entries,
            max_bytes=nbytes,
            eviction_policy=old.eviction_policy,
            durable=old.durable,
        )
        self.follow({})

    @rule(name=caches, how=st.sampled_from(["anew", "restart", "crash", "kill", "seal_and_crash"]))
    def begin_again(self, name: str, how: str) -> None:
        """One rule for what empties caches or ends watches, so that it is not all that happens."""
        self._judge_all()
        if how == "anew":
            self._make_anew(name)
        else:
            self.broker.clock.advance(START_MS)
            getattr(self.broker, how)()
            self._started()

    def _make_anew(self, name: str) -> None:
        path = self.path(name)
        watcher, version = self.everything.pop(path), self.model.pop(path).version
        slow = [each for each in self.slow if each.cache == name]
        self.broker.drop(path)
        for each in (watcher, *slow):
            assert [type(error) for error in each.ends] == [NotFound]
        self.slow = [each for each in self.slow if each.cache != name]
        self.make(name)
        assert self.model[path].version > version, "versions begin again"

    def make(self, name: str) -> None:
        config = CONFIGS[name]
        path = self.broker.cache(
            name,
            max_entries=config.max_entries,
            max_bytes=config.max_bytes,
            eviction_policy=config.eviction_policy,
            durable=config.durable,
        )
        self.model[path] = CacheModel(config, 0)
        self._watch(path)

    def _watch(self, path: Path) -> None:
        watcher = self.everything[path] = self.broker.watch(path, include=EVERYTHING)
        assert watcher.handle is not None
        model = self.model[path]
        if model.config.durable and model.version:
            assert watcher.handle.version == model.version, "a durable cache's versions go on"
        assert watcher.handle.version >= model.version, "versions went back"
        model.version = watcher.handle.version

    # -- slow watches -------------------------------------------------------------------------

    @rule(name=caches, key=st.none() | keys, include=st.sampled_from([frozenset(), EVERYTHING]))
    def watch(self, name: str, key: str | None, include: frozenset[str]) -> None:
        slow = Slow(name, key, include)
        self.broker.watch(self.path(name), key, watcher=slow, include=include)
        assert isinstance(slow.handle, CacheWatch)
        slow.handle._max_bytes = SLOW_BYTES
        slow.at = len(self.model[self.path(name)].log)
        self.slow.append(slow)

    @rule(some=st.sampled_from([0, 0, 1, 2, 5, 40]))
    def read_slow_watches(self, some: int) -> None:
        for slow in self.slow:
            assert slow.handle is not None
            self._judge(slow, slow.handle.take(some))

    def _judge(self, slow: Slow, events: list[WatchEvent]) -> None:
        log = self.model[self.path(slow.cache)].log
        kinds = [event.event for event in events]
        assert ("gap", "gap") not in pairwise(kinds), "one gap would do"
        for event in events:
            if event.event == "gap":
                assert event.from_version < event.version
                while slow.at < len(log) and log[slow.at].version <= event.version:
                    missed = log[slow.at]
                    assert missed.version > event.from_version or not slow.wants(missed)
                    slow.at += 1
                continue
            while not slow.wants(log[slow.at]):
                slow.at += 1
            assert event == log[slow.at], "out of order, or missing without a gap"
            slow.at += 1

    def _judge_all(self) -> None:
        """What they were given and their gaps cover all that happened."""
        for slow in self.slow:
            assert slow.handle is not None
            self._judge(slow, slow.handle.take(1000))
            log = self.model[self.path(slow.cache)].log
            assert not any(slow.wants(event) for event in log[slow.at :]), "something is missing"

    # -- restarts -----------------------------------------------------------------------------

    @rule(
        steps=st.lists(st.tuples(caches, keys, values, ttls, choice), min_size=1, max_size=4),
        flavour=st.sampled_from(FLAVOURS),
        seed=st.integers(0, 99),
        ms=st.sampled_from([0, 3, 50]),
    )
    def crash_in_doubt(self, steps: list[Any], flavour: str, seed: int, ms: int) -> None:
        """Commands that nobody saw answered: a first part of them may be there."""
        self._judge_all()
        self.broker.hold_writes()
        possible = [self._durable_content()]
        answers: list[Any] = []
        for step in steps:
            op = self._op(*step)
            command = {Put: "put", Delete: "delete", Increment: "increment"}[type(op)]
            has_record = self.broker.log.seq, self.broker.log._end
            outcomes: list[Any] = []
            getattr(self.broker.engine.caches, command)(op, outcomes.append)
            is_recorded = (self.broker.log.seq, self.broker.log._end) != has_record
            if self.model[op.path].config.durable and is_recorded:
                answers.append(outcomes)
            possible.append(self._durable_content())
            self.broker.clock.advance(ms)
        self.broker.scheduler.run()
        assert not any(answers), "answered before it was durable"
        self.broker.clock.advance(START_MS)
        self.broker.crash(flavour, seed)
        found = self._durable_content()
        assert self._live(found) in [self._live(each) for each in possible]
        for path, model in self.model.items():
            if model.config.durable:
                inside = self.broker.inside(path)
                model.version = inside.version
                model.entries = {
                    key: Held(entry.value, entry.version, entry.expires or None)
                    for key, entry in inside.entries.items()
                }
        self._started()

    def _durable_content(self) -> dict[Path, dict[str, Held]]:
        return {
            path: {
                key: Held(entry.value, entry.version, entry.expires or None)
                for key, entry in self.broker.inside(path).entries.items()
            }
            for path, model in self.model.items()
            if model.config.durable
        }

    def _live(self, content: dict[Path, dict[str, Held]]) -> dict[Path, dict[str, Held]]:
        return {
            path: {k: h for k, h in held.items() if h.expires is None or h.expires > self.now}
            for path, held in content.items()
        }

    def _started(self) -> None:
        self.follower = Follower(self.broker)
        self.slow = []
        for path, model in self.model.items():
            inside = self.broker.inside(path)
            # A snapshot leaves out what has expired.
            model.entries = {
                key: held
                for key, held in model.entries.items()
                if key in inside.entries or model.live(key, self.now)
            }
            model.restarted()
            self._watch(path)

    # -- judging ------------------------------------------------------------------------------

    def do(
        self,
        command: Callable[..., None],
        argument: Any,
        ops: list[Op],
        checks: list[Check] | None = None,
    ) -> None:
        expected = foresee(self.model, ops, checks or [], self.now)
        too_large = expected.error is None and self._is_too_large(expected, ops)
        outcome = self.broker.call(command, argument)
        if expected.error is not None or too_large:
            assert isinstance(outcome, PenstockError), outcome
            assert type(outcome) is (expected.error or TooLarge)
            assert not any(watcher.events for watcher in self.everything.values())
            return
        written = outcome if isinstance(outcome, list) else [outcome]
        assert all(isinstance(each, Written) for each in written), written
        plain = [Written(0, each.deleted, each.number) for each in written]
        assert plain == expected.written
        versions = {
            event.version for watcher in self.everything.values() for event in watcher.events
        }
        assert {each.version for each in written if each.version} <= versions
        self.follow(expected.changed, expected)

    def _is_too_large(self, expected: Expected, ops: list[Op]) -> bool:
        """Does what the ops leave written not fit by itself?"""
        left: dict[Path, dict[str, Held]] = {}
        for op, written in zip(ops, expected.written, strict=True):
            entries = left.setdefault(op.path, {})
            if isinstance(op, Delete):
                entries.pop(op.key, None)
            else:
                value = op.value if isinstance(op, Put) else b"%d" % (written.number or 0)
                entries[op.key] = Held(value, 0, None)
        return not all(self.model[path].fits(entries) for path, entries in left.items())

    def follow(
        self, changed: dict[Path, set[str]], expected: Expected | None = None
    ) -> dict[Path, list[WatchEvent]]:
        """Lets the events explain what happened, and judges that nothing was evicted in vain."""
        told = {path: watcher.drain() for path, watcher in self.everything.items()}
        gone = {
            path: happened(self.model[path], events, self.now, changed.get(path, set()))
            for path, events in told.items()
        }
        for (path, key), expires in (expected.expires if expected else {}).items():
            held = self.model[path].entries.get(key)
            if held is not None:
                self.model[path].entries[key] = Held(held.value, held.version, expires)
        total = sum(model.size() for model in self.model.values())
        total += sum(each.nbytes for each in gone.values())
        for path, each in gone.items():
            if each.before_last is not None and self.model[path].fits(each.before_last):
                assert total > MEMORY_BYTES, f"evicted from {path} without need"
        return told

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        check(self.broker.state)
        total = 0
        for path, model in self.model.items():
            inside = self.broker.inside(path)
            found = {
                key: Held(entry.value, entry.version, entry.expires or None)
                for key, entry in inside.entries.items()
            }
            assert found == model.entries, path
            assert inside.version == model.version
            assert model.fits(model.entries)
            assert self.broker.must(self.broker.engine.caches.size, path) == (
                len(found),
                model.size(),
            )
            total += model.size()
        assert total <= MEMORY_BYTES
        assert self.broker.engine.caches.watches.count == len(self.model) + len(self.slow)

    @invariant()
    def replays_to_the_same_state(self) -> None:
        must_equal(recovered(self.broker), self.broker)
        self.follower.compare()

    def teardown(self) -> None:
        self._judge_all()
        self.broker.close()
        assert self.broker.disk.open_files == 0, "files are left open"


TestCaches = CacheMachine.TestCase
TestCaches.settings = profile
