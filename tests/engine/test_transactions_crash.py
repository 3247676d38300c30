"""A crash at any call to the disk leaves a transaction whole or not begun, and so does any fault.

Transactions that consume, transform, produce and count are lived through on a disk that is
photographed before every call that changes it, as each kind of crash would leave it. A broker is
started on every photograph. Then the worker, which did not hear the answers, sends them again.
"""

from __future__ import annotations

import errno

import pytest

from penstock.api.transactions import Operation
from penstock.core.invariants import check
from penstock.engine.clock import ManualClock
from penstock.model.caching import Increment
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.model.limits import KIB, Limits
from penstock.storage.errors import StorageError
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS
from tests.engine.transaction_harness import CACHE, TransactionBroker, producing
from tests.engine.write_harness import Photographer
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=1)
"""Every append is a frame of its own, so that a transaction of several appends would be divided."""
LIMITS = Limits(lease_ms=LONG_MS, memory_bytes=64 * KIB)
INPUTS = [f"input {n}" for n in range(6)]


def broker_on(vfs: FaultyVfs, clock: ManualClock) -> TransactionBroker:
    broker = TransactionBroker(vfs, options=OPTIONS, limits=LIMITS, clock=clock)
    for name in ("in", "out"):
        broker.call(broker.engine.create_topic, name, 1)
    broker.cache("c", "default", "default", durable=True)
    return broker


def transform(broker: TransactionBroker) -> list[list[Operation]]:
    """One transaction for each message: two results of some size, the ack, and a count."""
    reader = broker.consume("in", lease_ms=LONG_MS)
    return [
        [
            producing("out", f"{item.value} -> a ".ljust(700, ".")),
            broker.fenced(reader, item),
            producing("out", f"{item.value} -> b ".ljust(700, ".")),
            Increment(CACHE, "done"),
        ]
        for item in reader.take()
    ]


def must_be_whole(broker: TransactionBroker, place: str) -> set[str]:
    """The inputs that are done, each with both of its results."""
    check(broker.state)
    done: list[str] = [value.split(" -> ")[0] for value in broker.contents("out")]
    pairs = done[::2]
    assert done[1::2] == pairs, f"{place}: half of a transaction"
    assert len(pairs) == len(set(pairs)), f"{place}: an input was transformed twice"
    counted = int(broker.read(CACHE, "done") or 0)
    assert counted == len(pairs), f"{place}: the count is {counted}, not {len(pairs)}"
    groups = broker.state.topics["in"].groups
    if "g" in groups:
        progress = groups["g"].progress[0]
        finished = [
            message.value
            for message in broker.stored("in")
            if message.offset < progress.cursor and message.offset not in progress.unfinished
        ]
        assert sorted(finished) == sorted(pairs), f"{place}: an ack without its results"
    else:
        assert not pairs
    return set(pairs)


class CountingPhotographer(Photographer):
    """Notes how many transactions were answered at each photograph."""

    def __init__(self, flavour: str) -> None:
        super().__init__(flavour)
        self.counts: list[int] = []

    def take(self) -> None:
        super().take()
        self.counts.append(len(self.answered))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_anywhere_leaves_every_transaction_whole_or_not_begun(flavour: str):
    vfs = CountingPhotographer(flavour)
    broker = broker_on(vfs, ManualClock())
    broker.put("in", *INPUTS)
    transactions = transform(broker)
    assert len(transactions) == len(INPUTS)
    vfs.is_watching = True
    vfs.take()
    for number, operations in enumerate(transactions):
        broker.do(*operations, tx=f"tx {number}")
        vfs.answered.append(number)
        if number == 3:
            broker.seal()
    vfs.take()
    vfs.is_watching = False
    broker.close()
    assert len(vfs.photographs) > 15
    found = []
    for number, (photograph, _) in enumerate(vfs.photographs):
        place = f"crash {number} of {len(vfs.photographs)}, {flavour}"
        again = broker_on(photograph, ManualClock())
        done = must_be_whole(again, place)
        assert done == set(INPUTS[: len(done)]), place
        assert len(done) >= vfs.counts[number], f"{place}: answered, and not there"
        found.append(len(done))
        for tx, operations in enumerate(transactions):
            outcome = again.try_commit(*operations, tx=f"tx {tx}")
            # The repeat of what is done gets its answer; the rest is done now.
            assert isinstance(outcome, list), f"{place}: {outcome}"
        assert must_be_whole(again, place) == set(INPUTS)
        again.close()
    assert set(found) == set(range(len(INPUTS) + 1))


class Life:
    """A worker that sends its transactions to a broker whose disk fails once."""

    def __init__(self) -> None:
        self.vfs = FaultyVfs()
        self.clock = ManualClock()
        self.answered: set[str] = set()
        self.broker: TransactionBroker | None = None

    def live(self) -> None:
        try:
            self.broker = broker = broker_on(self.vfs, self.clock)
            for value in INPUTS:
                broker.try_produce("in", value)
            for number, operations in enumerate(transform(broker)):
                outcome = broker.try_commit(*operations)
                if isinstance(outcome, list):
                    self.answered.add(INPUTS[number])
                if number == 3:
                    broker.log.roll()
                    broker.settle()
        except (OSError, StorageError, PenstockError, TimeoutError):
            pass

    def check(self) -> None:
        survivor = self.vfs.crash("nothing")
        if self.broker is not None:
            self.broker.abandon()
        broker = broker_on(survivor, self.clock)
        done = must_be_whole(broker, "after the fault")
        assert self.answered <= done, "answered, and not there"
        broker.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_a_call_to_the_disk_that_fails_leaves_every_transaction_whole_or_refused(code: int):
    """Wherever it comes; 0 is a short write."""
    whole = Life()
    whole.live()
    calls = len(whole.vfs.calls)
    assert len(whole.answered) == len(INPUTS)
    whole.check()
    for number in range(1, calls + 1):
        life = Life()
        life.vfs.fail_call(number, code)
        life.live()
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"with call {number} failing: {error}") from error


def test_a_worker_that_was_killed_produces_its_results_once():
    """Without an id, the fenced ack alone keeps a repeat from producing again."""
    broker = broker_on(FaultyVfs(), ManualClock())
    broker.put("in", "input 0")
    operations = transform(broker)[0]
    broker.do(*operations)
    broker.kill()
    refusal = broker.refused(*operations)
    assert isinstance(refusal, FailedPrecondition)
    assert refusal.operation == 1
    assert must_be_whole(broker, "after the repeat") == {"input 0"}
    broker.close()
