"""Any one call to the disk fails, wherever it comes: what was answered is there afterwards.

A short life of a broker (produce, consume, ack, nack, bury, seal, trim, restart) is lived through
once for every call it makes to the disk, with that call failing.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.core.invariants import check
from penstock.engine.clock import ManualClock
from penstock.model.errors import PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.records import Message
from penstock.storage.errors import StorageError
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, Reader, policy
from tests.storage.faulty_vfs import FaultyVfs

OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
LIMITS = Limits(memory_bytes=8 * KIB, lease_ms=500)
SHORT_WRITE = 0


class Life:
    """One broker, one fault, and what was answered before, during and after it."""

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.clock = ManualClock()
        self.stored: dict[int, str] = {}
        self.acked: set[int] = set()
        self.seen: set[int] = set()
        self.broker: Broker | None = None

    def live(self) -> None:
        """Goes as far as the disk lets it."""
        try:
            self.open()
            for part in range(3):
                self.produce(part * 8, 8)
                self.consume(part)
                self.running.pass_ms(600)
                self.running.log.roll()
                self.running.settle()
                if part == 1:
                    self.running.close()
                    self.open()
        except (OSError, StorageError, PenstockError, TimeoutError):
            pass

    @property
    def running(self) -> Broker:
        assert self.broker is not None
        return self.broker

    def open(self) -> None:
        self.broker = None
        self.broker = Broker(self.vfs, limits=LIMITS, options=OPTIONS, clock=self.clock)
        self.running.call(self.running.engine.create_topic, "t", 1)

    def produce(self, first: int, count: int) -> None:
        for n in range(first, first + count):
            envelope = policy(1) if n % 5 == 0 else None
            command = Produce("t", "", f"value {n} ".ljust(600, "."), envelope)
            outcome = self.running.call(self.running.engine.produce, command)
            if isinstance(outcome, Message):
                self.stored[outcome.offset] = outcome.value

    def consume(self, part: int) -> None:
        broker = self.running
        reader = Reader("t", "g", "o")
        opened = broker.call(broker.engine.open_consumer, "t", "g", "o", 0, 0, reader)
        if isinstance(opened, PenstockError):
            return
        broker.settle()
        for item in reader.take():
            self.seen.add(item.offset)
            assert self.stored.get(item.offset, item.value) == item.value
            if item.offset % 5 == 0:
                broker.nack(reader, item)
            elif item.offset % 3 == part and broker.ack(reader, item) is None:
                self.acked.add(item.offset)
        opened.close()
        broker.settle()

    def check(self) -> None:
        """A start on what is left of the disk, without further faults."""
        survivor = self.vfs.crash("nothing")
        if self.broker is not None:
            self.broker.abandon()
        broker = Broker(survivor, limits=LIMITS, options=OPTIONS, clock=self.clock)
        check(broker.state)
        if not self.stored:
            broker.close()
            return
        found = {message.offset: message.value for message in broker.stored("t")}
        lost = {n: v for n, v in self.stored.items() if found.get(n) != v}
        assert not lost, "answered, and not there"
        reader = broker.consume(lease_ms=LONG_MS)
        broker.pass_ms(1000)
        assert not self.acked & set(reader.offsets()), "acked, and delivered again"
        buried = [m.envelope.dlq.original_offset for m in self._letters(broker)]
        assert len(buried) == len(set(buried)), "buried twice"
        owed = set(found) - self.acked - set(buried)
        assert set(reader.offsets()) == owed, "neither done nor delivered"
        check(broker.state)
        broker.close()

    def _letters(self, broker: Broker) -> list[Any]:
        return list(broker.stored("dlq.t")) if "dlq.t" in broker.state.topics else []


def calls_of_a_whole_life() -> int:
    life = Life()
    life.live()
    assert len(life.stored) == 24
    assert life.acked
    count = len(life.vfs.calls)
    life.check()
    return count


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, SHORT_WRITE])
def test_a_call_that_fails_loses_nothing_that_was_answered(code: int):
    """driftq-35, 45, 46, 50."""
    hit = 0
    for number in range(1, calls_of_a_whole_life() + 1):
        life = Life()
        life.vfs.fail_call(number, code)
        life.live()
        hit += life.vfs.faults_hit
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"with call {number} failing: {error}") from error
    assert hit > 100
