"""Durable caches after a crash, and with any one call to the disk failing."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.core.invariants import check
from penstock.engine.clock import ManualClock
from penstock.model.caching import Delete, Put, Txn, Written
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB
from penstock.storage.errors import StorageError
from penstock.storage.log import WalOptions
from tests.engine.cache_harness import CacheBroker, durable
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_was_answered_survives_any_crash(flavour: str):
    """felix-111."""
    for seed in range(8):
        broker, path = durable()
        answered: dict[str, tuple[bytes, int]] = {}
        for n in range(30):
            version = broker.write(path, f"k{n % 7}", b"%d" % n)
            answered[f"k{n % 7}"] = (b"%d" % n, version)
        broker.hold_writes()
        outcomes = [
            broker.submit(broker.engine.caches.put, Put(path, f"k{n}", b"in doubt" * 200))
            for n in range(3)
        ]
        broker.scheduler.run()
        assert not any(outcomes)
        broker.crash(flavour, seed)
        found = {key: broker.value(path, key) for key in answered}
        for key, (value, version) in answered.items():
            value_found = found[key]
            assert value_found is not None
            is_old = (value_found.value, value_found.version) == (value, version)
            is_doubtful = key in ("k0", "k1", "k2") and value_found.value == b"in doubt" * 200
            assert is_old or is_doubtful
        check(broker.state)


OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
PATH = ("t", "n", "c")


class Life:
    """A broker's life with a durable cache, with one fault, and what was answered in it.

    `known` is what a key must have; a key of `doubtful` may also have what was refused.
    """

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.clock = ManualClock()
        self.known: dict[str, bytes | None] = {}
        self.doubtful: dict[str, set[bytes | None]] = {}
        self.version = 0
        self.broker: CacheBroker | None = None

    def live(self) -> None:
        try:
            self.open()
            for part in range(3):
                self.write(part)
                self.running.log.roll()
                self.running.settle()
                if part == 1:
                    self.running.close()
                    self.open()
        except (OSError, StorageError, PenstockError, TimeoutError):
            pass

    @property
    def running(self) -> CacheBroker:
        assert self.broker is not None
        return self.broker

    def open(self) -> None:
        self.broker = None
        self.broker = CacheBroker(self.vfs, options=OPTIONS, clock=self.clock)
        self.running.cache("c", durable=True, max_entries=12)

    def write(self, part: int) -> None:
        caches = self.running.engine.caches
        for n in range(part * 5, part * 5 + 10):
            key, value = f"k{n}", b"%d" % n * 300
            self.ask(caches.put, Put(PATH, key, value), {key: value})
            if n % 4 == 0:
                self.ask(caches.delete, Delete(PATH, key), {key: None})
            if n % 3 == 0:
                pair: dict[str, bytes | None] = {"a": b"a%d" % n, "b": b"b%d" % n}
                ops = [Put(PATH, k, v) for k, v in pair.items() if v is not None]
                self.ask(caches.transact, Txn([], [*ops]), pair)

    def ask(self, command: Any, argument: Any, changes: dict[str, bytes | None]) -> None:
        outcome = self.running.call(command, argument)
        for key, value in changes.items():
            if isinstance(outcome, PenstockError):
                self.doubtful.setdefault(key, set()).add(value)
            else:
                self.known[key] = value
        if isinstance(outcome, Written) and outcome.version:
            assert outcome.version > self.version
            self.version = outcome.version

    def check(self) -> None:
        """A start on what is left of the disk, without further faults."""
        survivor = self.vfs.crash("nothing")
        if self.broker is not None:
            self.broker.abandon()
        broker = CacheBroker(survivor, options=OPTIONS, clock=self.clock)
        check(broker.state)
        if self.known:
            self.compare(broker)
        broker.close()

    def compare(self, broker: CacheBroker) -> None:
        found = {key: entry.value for key, entry in broker.inside(PATH).entries.items()}
        assert len(found) <= 12
        assert broker.inside(PATH).version >= self.version, "a version would be used again"
        for key, value in found.items():
            assert value in {self.known.get(key), *self.doubtful.get(key, ())}, key
        # Which keys were evicted is not known here; those written last cannot have been.
        for key in list(self.known)[-3:]:
            expected = {self.known[key], *self.doubtful.get(key, ())}
            assert self.doubtful or found.get(key) in expected, key
        numbers = {found[key][1:] for key in ("a", "b") if key in found}
        assert len(numbers) <= 1, "half of a transaction"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_a_call_to_the_disk_that_fails_loses_nothing_that_was_answered(code: int):
    """felix-111, 81: wherever it comes; 0 is a short write."""
    whole = Life()
    whole.live()
    calls = len(whole.vfs.calls)
    assert len(whole.known) == 22
    whole.check()
    hit = 0
    for number in range(1, calls + 1):
        life = Life()
        life.vfs.fail_call(number, code)
        life.live()
        hit += life.vfs.faults_hit
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"with call {number} failing: {error}") from error
    assert hit > 100
