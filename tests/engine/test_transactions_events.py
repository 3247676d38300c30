"""Acks and nacks of named subscriptions in transactions: consume, transform, publish at once."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.api.transactions import (
    EventAckOperation,
    EventNackOperation,
    Operation,
    TransactionCommand,
)
from penstock.core.invariants import check
from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound, PenstockError
from penstock.model.item import EventItem
from penstock.model.limits import Limits
from penstock.model.streams import Publish
from penstock.model.tenancy import Path
from penstock.model.transactions import OperationResult, SettledResult, StoredResult
from tests.engine.durable_stream_harness import EARLIEST, EventReader, Streams, payloads
from tests.property.follower import Follower

TARGET = ("acme", "prod", "results")
SETTLED = SettledResult()


@pytest.fixture
def broker() -> Streams:
    """It keeps the events a and b, and a stream for results."""
    streams = Streams(limits=Limits(lease_ms=1000))
    streams.create("results")
    streams.publish(b"a", b"b")
    return streams


def commit(
    broker: Streams, *operations: Operation, tx: str = ""
) -> list[OperationResult] | PenstockError:
    command = TransactionCommand([*operations], tx)
    outcome: list[OperationResult] | PenstockError = broker.call(
        broker.engine.transactions.commit, command
    )
    return outcome


def refused(broker: Streams, *operations: Operation) -> PenstockError:
    """The refusal; the log has nothing of it."""
    seq, position = broker.log.seq, broker.engine.parts.ledger.position
    outcome = commit(broker, *operations)
    assert isinstance(outcome, PenstockError), outcome
    assert (broker.log.seq, broker.engine.parts.ledger.position) == (seq, position)
    return outcome


def acking(reader: EventReader, event: EventItem, **changes: Any) -> EventAckOperation:
    members: dict[str, Any] = {
        "path": ("acme", "prod", "orders"),
        "name": reader.group,
        "offset": event.offset,
        "owner": reader.owner,
        "delivery_id": event.delivery_id,
    }
    return EventAckOperation(**members | changes)


def nacking(reader: EventReader, event: EventItem, **how: Any) -> EventNackOperation:
    ack = acking(reader, event)
    return EventNackOperation(
        ack.path, ack.name, ack.offset, ack.owner, ack.delivery_id, "because", **how
    )


def result(payload: bytes, path: Path = TARGET) -> Publish:
    return Publish(path=path, payloads=[payload])


def results(broker: Streams) -> list[Any]:
    return [message.value for message in broker.stored("\x1e" + "\x1f".join(TARGET))]


def unacked(broker: Streams, name: str = "billing") -> list[int]:
    progress = broker.state.topics[broker.log_name].groups[name].progress[0]
    return list(progress.unfinished)


def test_an_event_is_acked_with_what_was_made_of_it(broker: Streams) -> None:
    """felix-123: consume, transform, publish."""
    follower = Follower(broker)
    reader = broker.named(start=EARLIEST)
    first, second = reader.take()
    assert commit(broker, result(b"A"), acking(reader, first)) == [StoredResult(0, 0), SETTLED]
    assert unacked(broker) == [second.offset]
    follower.compare()
    check(broker.state)
    broker.crash()
    assert results(broker) == [b"A"]
    again = broker.named(owner="w2")
    assert payloads(again.take()) == [b"b"]


def test_a_crash_before_the_commit_leaves_the_event_unacked(broker: Streams) -> None:
    """felix-123."""
    reader = broker.named(start=EARLIEST)
    first, _ = reader.take()
    broker.hold_writes()
    command = TransactionCommand([acking(reader, first), result(b"A")])
    assert broker.submit(broker.engine.transactions.commit, command) == []
    broker.crash()
    assert results(broker) == []
    assert payloads(broker.named().take()) == [b"a", b"b"]


def test_an_event_that_is_done_refuses_the_transaction(broker: Streams) -> None:
    """The lease of a subscriber ends and another finishes the event, then the first one is done."""
    late = broker.named(start=EARLIEST)
    item = late.take()[0]
    late.live.close()
    broker.pass_ms(1001)
    other = broker.named(owner="w2")
    taken = other.take()[0]
    stale = refused(broker, result(b"A"), acking(late, item))
    assert isinstance(stale, FailedPrecondition)
    assert isinstance(commit(broker, result(b"A"), acking(other, taken)), list)
    for operation in (acking(late, item), acking(other, taken), nacking(other, taken)):
        refusal = refused(broker, result(b"A"), operation)
        assert isinstance(refusal, FailedPrecondition)
        assert refusal.operation == 1
        assert "already done" in refusal.message
    assert results(broker) == [b"A"]


def test_a_delivery_id_fences_an_earlier_delivery_of_the_event(broker: Streams) -> None:
    reader = broker.named(start=EARLIEST)
    first = reader.take()[0]
    broker.pass_ms(1001)
    again = next(item for item in reader.take() if item.offset == first.offset)
    assert isinstance(refused(broker, result(b"A"), acking(reader, first)), FailedPrecondition)
    assert isinstance(commit(broker, result(b"A"), acking(reader, again)), list)


def test_each_wrong_ack_of_an_event_refuses_all_of_it(broker: Streams) -> None:
    """felix-123."""
    reader = broker.named(start=EARLIEST)
    event = reader.take()[0]
    ticks = broker.create("ticks", delivery="at_most_once", durable=False)
    plain = broker.create("plain", delivery="at_most_once")
    wrongs: list[tuple[Operation, type[PenstockError]]] = [
        (acking(reader, event, owner="another"), FailedPrecondition),
        (acking(reader, event, delivery_id="1-99"), FailedPrecondition),
        (acking(reader, event, name="nobody"), FailedPrecondition),
        (acking(reader, event, offset=7), FailedPrecondition),
        (acking(reader, event, path=("acme", "prod", "nowhere")), NotFound),
        (acking(reader, event, path=ticks), FailedPrecondition),
        (acking(reader, event, path=plain), FailedPrecondition),
        (nacking(reader, event, delay_ms=-1), InvalidArgument),
    ]
    for wrong, kind in wrongs:
        refusal = refused(broker, result(b"A"), acking(reader, event), wrong)
        assert (type(refusal), refusal.operation) == (kind, 2), wrong
    elsewhere = acking(reader, event, path=("acme", "test", "orders"))
    assert "one namespace" in refused(broker, result(b"A"), elsewhere).message
    assert results(broker) == []
    assert unacked(broker) == [0, 1]


def test_a_nack_brings_the_event_again(broker: Streams) -> None:
    """felix-119."""
    reader = broker.named(start=EARLIEST)
    first, second = reader.take()
    outcome = commit(
        broker, nacking(reader, first, delay_ms=100), acking(reader, second), result(b"B")
    )
    assert outcome == [SETTLED, SETTLED, StoredResult(0, 0)]
    broker.pass_ms(50)
    assert reader.take() == []
    broker.pass_ms(60)
    again = reader.one()
    assert (again.offset, again.attempts, again.last_error) == (first.offset, 2, "because")
    check(broker.state)


@pytest.mark.parametrize("kinds", ["ack ack", "ack nack", "nack ack"])
def test_an_event_is_settled_once_in_a_transaction(broker: Streams, kinds: str) -> None:
    reader = broker.named(start=EARLIEST)
    event = reader.take()[0]
    kind: dict[str, Operation] = {"ack": acking(reader, event), "nack": nacking(reader, event)}
    refusal = refused(broker, *(kind[each] for each in kinds.split()))
    assert isinstance(refusal, FailedPrecondition)
    assert refusal.operation == 1


def test_each_name_has_its_own_acks(broker: Streams) -> None:
    billing, audit = broker.named(start=EARLIEST), broker.named("audit", start=EARLIEST)
    event, other = billing.take()[0], audit.take()[0]
    outcome = commit(broker, acking(billing, event), acking(audit, other))
    assert outcome == [SETTLED, SETTLED]
    assert (unacked(broker), unacked(broker, "audit")) == ([1], [1])


def test_acks_make_room_for_the_next_events(broker: Streams) -> None:
    reader = broker.named(start=EARLIEST, prefetch=1)
    (first,) = reader.take()
    assert isinstance(commit(broker, acking(reader, first), result(b"A")), list)
    assert payloads(reader.take()) == [b"b"]


def test_a_full_disk_refuses_no_ack_of_an_event(broker: Streams) -> None:
    reader = broker.named(start=EARLIEST)
    first, second = reader.take()
    broker.log.has_room = lambda nbytes, *, reserve=False: reserve
    assert isinstance(refused(broker, acking(reader, first), result(b"A")), PenstockError)
    outcome = commit(broker, acking(reader, first), nacking(reader, second))
    assert outcome == [SETTLED, SETTLED]


def test_a_repeat_gets_the_first_answer(broker: Streams) -> None:
    """Also when the subscriber, which did not hear the answer, asks a broker that was restarted."""
    reader = broker.named(start=EARLIEST)
    operations: list[Operation] = [acking(reader, reader.take()[0]), result(b"A")]
    first = commit(broker, *operations, tx="tx")
    assert first == [SETTLED, StoredResult(0, 0)]
    broker.crash()
    assert commit(broker, *operations, tx="tx") == first
    assert isinstance(refused(broker, *operations), FailedPrecondition)
    assert results(broker) == [b"A"]


def test_events_and_messages_are_settled_together(broker: Streams) -> None:
    topic = "\x1f".join(("acme", "prod", "t"))
    broker.topic(topic)
    reader = broker.named(start=EARLIEST)
    event = reader.take()[0]
    outcome = commit(broker, Produce(topic, "", "m"), acking(reader, event), result(b"A"))
    assert outcome == [StoredResult(0, 0), SETTLED, StoredResult(0, 0)]
    broker.crash()
    assert [message.value for message in broker.stored(topic)] == ["m"]
