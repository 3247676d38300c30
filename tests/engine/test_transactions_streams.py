"""Publishes to durable streams in transactions: all or none, seen once durable, in one order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.api.messages import Produce
from penstock.api.transactions import AckOperation, Operation, TransactionCommand
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
)
from penstock.model.limits import MAX_PUBLISH_ANSWERS, Limits
from penstock.model.scopes import full_name
from penstock.model.streams import Publish
from penstock.model.transactions import (
    DuplicateResult,
    OperationResult,
    StoredResult,
    decode_results,
)
from tests.engine.durable_stream_harness import EARLIEST, LATEST, Streams

TOPIC = full_name(("acme", "prod"), "t")


def publishing(broker: Streams, *payloads: bytes, **numbers: object) -> Publish:
    return Publish(path=broker.path, payloads=list(payloads), **numbers)  # type: ignore[arg-type]


def commit(
    broker: Streams, *operations: Operation, tx: str = ""
) -> list[OperationResult] | PenstockError:
    command = TransactionCommand([*operations], tx)
    outcome: list[OperationResult] | PenstockError = broker.call(
        broker.engine.transactions.commit, command
    )
    return outcome


def kept(broker: Streams) -> list[Any]:
    """The payloads in the log of the stream."""
    return [message.value for message in broker.stored(broker.log_name)]


@pytest.fixture
def broker() -> Streams:
    streams = Streams()
    streams.topic(TOPIC)
    return streams


def test_publishes_and_produces_are_stored_together(broker: Streams) -> None:
    """felix-123."""
    outcome = commit(
        broker,
        publishing(broker, b"a", b"b"),
        Produce(TOPIC, "", "m"),
        publishing(broker, b"c"),
    )
    assert outcome == [StoredResult(0, 0), StoredResult(0, 0), StoredResult(0, 2)]
    reader = broker.named(start=EARLIEST)
    assert [item.value for item in reader.take()] == [b"a", b"b", b"c"]
    broker.crash()
    assert kept(broker) == [b"a", b"b", b"c"]
    assert [m.value for m in broker.stored(TOPIC)] == ["m"]


@pytest.mark.parametrize("kind", ["topic", "stream", "delivery"])
def test_nothing_is_published_if_another_operation_is_refused(broker: Streams, kind: str) -> None:
    """felix-123."""
    wrong: dict[str, Operation] = {
        "topic": Produce(full_name(("acme", "prod"), "nope"), "", "m"),
        "stream": Publish(path=("acme", "prod", "nope"), payloads=[b"x"]),
        "delivery": AckOperation(broker.naming(broker.consume(TOPIC, "g"), 0)),
    }
    outcome = commit(broker, publishing(broker, b"a"), wrong[kind])
    assert isinstance(outcome, NotFound | FailedPrecondition)
    assert outcome.operation == 1
    assert kept(broker) == []
    assert broker.publish(b"next") == 0


def test_a_crash_before_the_commit_leaves_nothing_of_it(broker: Streams) -> None:
    """felix-123."""
    broker.hold_writes()
    command = TransactionCommand([publishing(broker, b"a"), Produce(TOPIC, "", "m")])
    outcomes = broker.submit(broker.engine.transactions.commit, command)
    assert outcomes == []
    broker.crash()
    assert kept(broker) == []
    assert broker.stored(TOPIC) == []


def test_subscribers_and_replays_see_the_events_once_in_the_order_of_the_log(
    broker: Streams,
) -> None:
    plain = broker.listen()
    replay = broker.listen(start=EARLIEST)
    broker.publish(b"1")
    commit(broker, publishing(broker, b"2", b"3"))
    broker.publish(b"4")
    commit(broker, publishing(broker, b"5"), publishing(broker, b"6"))
    broker.settle()
    expected = [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert plain.events == expected
    assert replay.events == expected
    assert replay.offsets == list(range(6))


def test_a_replay_gets_the_events_where_nobody_else_listens(broker: Streams) -> None:
    replay = broker.listen(start=EARLIEST)
    commit(broker, publishing(broker, b"1", b"2"))
    broker.settle()
    assert replay.events == [b"1", b"2"]


def test_events_fan_out_only_when_they_are_durable(broker: Streams) -> None:
    """felix-28."""
    plain = broker.listen()
    replay = broker.listen(start=LATEST)
    broker.hold_writes()
    command = TransactionCommand([publishing(broker, b"a")])
    broker.submit(broker.engine.transactions.commit, command)
    broker.scheduler.run()
    assert (plain.events, replay.events) == ([], [])


def test_a_numbered_publish_is_stored_once() -> None:
    """felix-122, 123."""
    broker = Streams(delivery="exactly_once")
    numbered = publishing(broker, b"a", producer_id="p", sequence=0)
    assert commit(broker, numbered) == [StoredResult(0, 0)]
    assert commit(broker, numbered) == [DuplicateResult(0)]
    broker.restart()
    assert commit(broker, numbered) == [DuplicateResult(0)]
    missing = commit(broker, publishing(broker, b"c"))
    assert isinstance(missing, InvalidArgument)
    twice = commit(
        broker,
        publishing(broker, b"b", producer_id="p", sequence=1),
        publishing(broker, b"c", producer_id="p", sequence=2),
    )
    assert isinstance(twice, InvalidArgument)
    assert kept(broker) == [b"a"]


def test_a_repeated_publish_is_answered_with_its_first_offset() -> None:
    """felix-122: while the broker knows it."""
    broker = Streams(delivery="exactly_once")
    broker.topic(TOPIC)
    numbers = range(MAX_PUBLISH_ANSWERS + 1)
    publishes = [
        publishing(broker, b"a%d" % n, b"b%d" % n, producer_id="p", sequence=n) for n in numbers
    ]
    assert [commit(broker, publish) for publish in publishes] == [
        [StoredResult(0, 2 * n)] for n in numbers
    ]
    repeat: list[Operation] = [Produce(TOPIC, "", "m"), publishes[-1]]
    first = commit(broker, *repeat, tx="repeat")
    assert first == [StoredResult(0, 0), DuplicateResult(2 * numbers[-1])]
    broker.restart()
    assert commit(broker, *repeat, tx="repeat") == first
    assert commit(broker, publishes[0]) == [DuplicateResult()]
    assert len(kept(broker)) == 2 * len(numbers)


def test_a_gap_in_the_numbers_refuses_all_of_it() -> None:
    """felix-122, 123."""
    broker = Streams(delivery="exactly_once")
    broker.topic(TOPIC)
    gap = commit(
        broker, Produce(TOPIC, "", "m"), publishing(broker, b"c", producer_id="p", sequence=1)
    )
    assert isinstance(gap, FailedPrecondition)
    assert gap.operation == 1
    assert (kept(broker), broker.stored(TOPIC)) == ([], [])


def test_the_answers_of_earlier_versions_are_read() -> None:
    """Before there was an offset in it, the result of a duplicate was its tag alone."""
    assert decode_results(msgspec.msgpack.encode([[2], [1, 0, 7]])) == [
        DuplicateResult(),
        StoredResult(0, 7),
    ]


def test_the_buffer_counts_over_the_whole_transaction() -> None:
    broker = Streams(limits=Limits(lease_ms=1000, max_partition_msgs=3))
    broker.named(start=EARLIEST)
    fits = publishing(broker, b"a", b"b")
    outcome = commit(broker, fits, publishing(broker, b"c", b"d"))
    assert isinstance(outcome, ResourceExhausted)
    assert outcome.operation == 1
    assert commit(broker, fits, publishing(broker, b"c")) == [
        StoredResult(0, 0),
        StoredResult(0, 2),
    ]


def test_an_ephemeral_stream_is_refused(broker: Streams) -> None:
    path = broker.create("ticks", delivery="at_most_once", durable=False)
    outcome = commit(broker, Publish(path=path, payloads=[b"x"]))
    assert isinstance(outcome, FailedPrecondition)
