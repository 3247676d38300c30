"""Any history of transactions is that of a plain model, with restarts, crashes and maintenance.

Operations are chosen so that about half of the transactions are refused: somebody else's delivery,
a stale one, one that is done, an unknown topic, a full partition, a condition that fails. Whatever
happens, the broker holds what the model says, a follower of the log has the live state, and a crash
before the answer leaves all of a transaction or nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.api.messages import Produce, Settle
from penstock.api.transactions import (
    AckOperation,
    NackOperation,
    Operation,
    TransactionCommand,
)
from penstock.core.invariants import check
from penstock.model.caching import Delete, Increment, Put
from penstock.model.envelope import Envelope
from penstock.model.errors import FailedPrecondition, PenstockError
from penstock.model.limits import KIB, Limits
from penstock.model.transactions import CacheResult, OperationResult
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Reader
from tests.engine.transaction_harness import CACHE, TransactionBroker
from tests.property.follower import Follower
from tests.property.transaction_model import MAX_MSGS, TTL_MS, TransactionModel
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs
from tests.thresholds import SMALL, lowered

HISTORIES = int(os.environ.get("PENSTOCK_TEST_HISTORIES", "0"))
OPTIONS = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=1)
LIMITS = Limits(
    lease_ms=LONG_MS,
    idempotency_ttl_ms=TTL_MS,
    max_partition_msgs=MAX_MSGS,
    memory_bytes=16 * KIB,
)

COUNTS: Counter[str] = Counter()

number = st.integers(0, 11)
operation = st.tuples(st.integers(0, 9), number, number)
transaction = st.tuples(
    st.sampled_from(["commit", "commit", "commit", "hold"]),
    st.lists(operation, min_size=1, max_size=5),
    number,
)
event: st.SearchStrategy[Any] = st.tuples(
    st.sampled_from(["repeat", "repeat", "repeat", "pass", "crash", "kill", "restart", "seal"]),
    st.just([]),
    number,
)
histories = st.lists(st.one_of(transaction, transaction, event), min_size=15, max_size=40)


class History:
    """A broker and its model, which live through the same steps."""

    def __init__(self) -> None:
        self.model = TransactionModel()
        self.count = 0
        self.last: TransactionCommand | None = None
        self.broker = TransactionBroker(FaultyVfs(), limits=LIMITS, options=OPTIONS)
        for name, partitions in self.model.partitions.items():
            self.broker.topic(name, partitions)
        self.broker.cache("c", "default", "default", durable=True)
        for value in ("a", "b", "c", "d", "e", "f"):
            envelope = Envelope(partition_override=ord(value) % 2)
            self.broker.produce("in", value, envelope=envelope)
            self.model.topics["in"].append((ord(value) % 2, value))
        self.opened()

    def opened(self) -> None:
        self.reader = self.broker.consume("in", lease_ms=LONG_MS, reader=Reader("in", "g", "o"))
        self.broker.settle()
        self.follower = Follower(self.broker)
        self.hear()

    def hear(self) -> None:
        for item in self.reader.take():
            self.model.deliveries[item.offset] = item.delivery_id

    # -- steps --------------------------------------------------------------------------------

    def step(self, what: str, shapes: list[tuple[int, int, int]], choice: int) -> None:
        if what in ("commit", "hold"):
            operations = [self.operation(*shape) for shape in shapes]
            tx = f"tx {choice % 4}" if choice < 6 else ""
            self.last = TransactionCommand(operations, tx, repr(operations).encode())
        if what == "hold":
            self.commit_and_crash(choice)
        elif what in ("commit", "repeat"):
            if self.last is not None:
                self.commit(self.last)
        elif what == "pass":
            self.broker.pass_ms(choice * TTL_MS // 10)
        elif what == "seal":
            self.broker.seal()
        else:
            getattr(self.broker, what)()
            self.opened()
        self.hear()
        self.compare()

    def commit(self, command: TransactionCommand) -> None:
        now_ms = self.broker.clock.now_ms()
        before = self.model
        self.model, expected = before.after(
            command.operations, command.transaction_id, command.fingerprint, now_ms
        )
        outcome = self.broker.call(self.broker.engine.transactions.commit, command)
        if expected is None:
            assert isinstance(outcome, FailedPrecondition)
            assert outcome.operation is None
            COUNTS["ids used twice"] += 1
        elif isinstance(expected, int):
            assert isinstance(outcome, PenstockError), outcome
            assert outcome.operation == expected, outcome.message
            COUNTS["refused"] += 1
        else:
            assert not isinstance(outcome, PenstockError), outcome
            assert [_without_version(result) for result in outcome] == expected
            COUNTS["repeated" if self.model is before else "committed"] += 1

    def commit_and_crash(self, choice: int) -> None:
        """The crash comes while the frame is on its way to disk."""
        assert self.last is not None
        now_ms = self.broker.clock.now_ms()
        command = self.last
        after, expected = self.model.after(
            command.operations, command.transaction_id, command.fingerprint, now_ms
        )
        disk = self.broker.disk
        disk._dsync_flag = 0  # a write and a sync: the crash comes between them
        self.broker.hold_writes()
        outcomes = self.broker.submit(self.broker.engine.transactions.commit, command)
        self.broker.scheduler.run()
        if self.broker.log.has_pending:
            self.broker.scheduler.run_until(lambda: disk.is_held)
        is_changed = after.facts() != self.model.facts() or after.ids != self.model.ids
        assert not outcomes or not is_changed, "answered before it was durable"
        self.broker.crash(FLAVOURS[choice % len(FLAVOURS)], choice)
        if self.is_kept(command):
            assert isinstance(expected, list)
            self.model = after
            COUNTS["kept by a crash"] += 1
        elif after is not self.model:
            COUNTS["lost by a crash"] += 1
        assert self.facts() == self.model.facts(), "half of a transaction"
        self.opened()

    def is_kept(self, command: TransactionCommand) -> bool:
        """An id tells; without one, a change does."""
        if not command.transaction_id:
            return self.facts() != self.model.facts()
        now_ms = self.broker.clock.now_ms()
        known = self.broker.state.transactions.get(command.transaction_id, now_ms)
        return known is not None and known.fingerprint == command.fingerprint

    def operation(self, kind: int, a: int, b: int) -> Operation:
        if kind < 4:
            self.count += 1
            topic = "out" if kind < 3 else "in"
            topic = "unknown" if a == b == 11 else topic
            envelope = Envelope(
                partition_override=a % 2, idempotency_key=f"once {b}" if b < 3 else ""
            )
            value = f"value {self.count} ".ljust(200 * (b % 3), ".")
            return Produce(topic, "", value, envelope)
        if kind < 7:
            delivery = self.delivery(a, b)
            if kind < 6:
                return AckOperation(delivery)
            dead = b % 3 == 0
            return NackOperation(delivery, "because", None if dead else 0, dead)
        key = f"key {a % 4}"
        if kind == 7:
            return Put(CACHE, key, b"%d" % b if b % 7 else b"text", if_not_exists=b % 5 == 0)
        return Delete(CACHE, key) if kind == 8 else Increment(CACHE, key, b)

    def delivery(self, a: int, b: int) -> Settle:
        """Mostly one that is unfinished; also one that is done, stale, or another owner's."""
        known = sorted(set(self.model.deliveries) - self.model.done)
        if not known or b == 11:
            known = sorted(self.model.deliveries) or [0]
        offset = known[a % len(known)]
        partition = self.model.topics["in"][offset][0] if self.model.topics["in"] else 0
        delivery_id = self.model.deliveries.get(offset, "")
        return Settle(
            "in",
            "g",
            1 - partition if b == 10 else partition,
            offset,
            "p" if b == 9 else "o",
            "9-9" if b == 8 else delivery_id,
        )

    # -- looking ------------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        state, broker = self.broker.state, self.broker
        group = state.topics["in"].groups["g"]
        stored = {name: self.contents(name) for name in ("in", "out")}
        done = {
            offset
            for offset, (partition, _) in enumerate(stored["in"])
            if offset < group.progress[partition].cursor
            and offset not in group.progress[partition].unfinished
        }
        dead = broker.contents("dlq.in") if "dlq.in" in state.topics else []
        assert len(dead) == len(set(dead)), "buried twice"
        entries = broker.inside(CACHE).entries
        return {
            "topics": stored,
            "done": done,
            "dead": set(dead),
            "cache": {key: entry.value for key, entry in entries.items()},
        }

    def contents(self, topic: str) -> list[tuple[int, str]]:
        partitions = range(self.model.partitions[topic])
        found = [m for index in partitions for m in self.broker.stored(topic, index)]
        found.sort(key=lambda message: message.offset)
        assert [message.offset for message in found] == list(range(len(found)))
        return [(message.partition, message.value) for message in found]

    def compare(self) -> None:
        check(self.broker.state)
        self.follower.compare()
        assert self.facts() == self.model.facts()
        unfinished = set(range(len(self.model.topics["in"]))) - self.model.done
        assert unfinished <= set(self.model.deliveries), "not delivered"


def _without_version(result: OperationResult) -> OperationResult:
    if isinstance(result, CacheResult):
        return CacheResult(0, result.deleted, result.number)
    return result


@pytest.mark.parametrize("is_small", [False, True], ids=["usual", "small thresholds"])
def test_any_history_of_transactions_is_that_of_the_model(is_small: bool) -> None:
    COUNTS.clear()

    @settings(
        max_examples=HISTORIES or 60,
        derandomize=not HISTORIES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories)
    def live(steps: list[Any]) -> None:
        history = History()
        for step in steps:
            history.step(*step)
        history.broker.close()

    if is_small:
        with lowered(SMALL):
            live()
    else:
        live()
    for what in ("committed", "refused", "repeated", "kept by a crash", "lost by a crash"):
        assert COUNTS[what] >= 10, COUNTS
    assert COUNTS["ids used twice"], COUNTS
