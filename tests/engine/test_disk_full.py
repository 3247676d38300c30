"""A disk that fills up: produce is refused first, the rest goes on, and all resumes by itself."""

from __future__ import annotations

import pytest

from penstock.core.image import take_image
from penstock.core.invariants import check
from penstock.model.errors import PenstockError, Unavailable
from penstock.model.limits import KIB, MIB, Limits
from penstock.storage.log import WalOptions
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values

RESERVED = WalOptions(segment_bytes=256 * KIB, reserve_bytes=MIB)
TINY = WalOptions(segment_bytes=32 * KIB, reserve_bytes=0, frame_bytes=16 * KIB)
SPACE_CHECK_MS = 1001


def fill_disk(broker: Broker, left: int = 512 * KIB) -> None:
    """Less than the reserve is left, and the broker has noticed."""
    broker.disk.capacity_bytes = broker.disk.used_bytes + left
    broker.pass_ms(SPACE_CHECK_MS)


def make_room(broker: Broker) -> None:
    """The disk is looked at once a second; what it has is acted on within the next."""
    broker.disk.capacity_bytes = 2**40
    broker.pass_ms(2 * SPACE_CHECK_MS)


def is_refused(outcome: object) -> bool:
    return isinstance(outcome, Unavailable)


def test_a_full_disk_refuses_produce_while_everything_else_goes_on():
    """driftq-49."""
    broker = on_disk(options=RESERVED, limits=Limits(max_in_flight=1, lease_ms=500))
    broker.topic()
    broker.put("t", "a", "b", "c")
    reader = broker.consume()
    fill_disk(broker)
    assert is_refused(broker.try_produce("t", "refused"))
    assert broker.engine.health().ready
    broker.pass_ms(2000)
    item = reader.take()[-1]
    assert item.value == "a", "leases still end and redeliver"
    assert broker.nack(reader, item, delay_ms=0) is None
    item = reader.one()
    assert (item.value, item.last_error) == ("a", "because")
    assert broker.ack(reader, item) is None
    assert values(reader.items) == ["b"]
    other = broker.consume(group="new")
    assert values(other.items) == ["a"]
    broker.close()


def test_produce_resumes_by_itself_when_there_is_room():
    """driftq-49, 45: and what was refused is nowhere."""
    broker = on_disk(options=RESERVED)
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    fill_disk(broker)
    assert is_refused(broker.try_produce("t", "refused"))
    outcomes = broker.call(
        broker.engine.produce_many, [broker.command("t", f"refused {n}") for n in range(3)]
    )
    assert all(map(is_refused, outcomes))
    make_room(broker)
    assert broker.produce("t", "stored").offset == 0
    assert values(reader.items) == ["stored"]
    broker.crash()
    assert values(broker.stored("t")) == ["stored"]
    broker.close()


def test_a_refused_produce_leaves_its_idempotency_key_free():
    """driftq-58."""
    broker = on_disk(options=RESERVED)
    broker.topic()
    envelope = policy(idempotency_key="once")
    fill_disk(broker)
    assert is_refused(broker.try_produce("t", "a", envelope=envelope))
    make_room(broker)
    assert broker.produce("t", "a", envelope=envelope).offset == 0
    broker.close()


@pytest.mark.parametrize("by", ["nack", "lapse"])
def test_on_a_full_disk_the_move_to_the_dead_letters_waits_and_writes_nothing(by: str):
    """driftq-41: it holds no place in flight meanwhile."""
    broker = on_disk(options=RESERVED, limits=Limits(max_in_flight=1, lease_ms=5000))
    broker.topic()
    broker.produce("t", "dying", envelope=policy(1))
    broker.put("t", "next")
    reader = broker.consume()
    item = reader.one()
    fill_disk(broker)
    if by == "nack":
        assert broker.nack(reader, item) is None
    else:
        broker.pass_ms(5000)
    assert broker.in_flight() == 1
    assert values(reader.items) == ["next"], "its place in flight is free"
    assert broker.ack(reader, reader.one()) is None
    seq = broker.log.seq
    broker.pass_ms(5000)
    assert broker.log.seq == seq, "something was written"
    assert "dlq.t" not in broker.state.topics
    check(broker.state)
    make_room(broker)
    copy = broker.stored("dlq.t")
    assert values(copy) == ["dying"]
    assert copy[0].envelope is not None
    assert copy[0].envelope.dlq is not None
    assert copy[0].envelope.dlq.last_error == ("because" if by == "nack" else "ack_timeout")
    assert copy[0].envelope.dlq.attempts == 1
    assert not reader.items
    check(broker.state)
    broker.close()


def dying_on_a_full_disk() -> tuple[Broker, Reader]:
    """A message whose last lease ended and whose copy has no room yet."""
    broker = on_disk(options=RESERVED, limits=Limits(lease_ms=5000))
    broker.topic()
    broker.produce("t", "dying", envelope=policy(1))
    reader = broker.consume()
    fill_disk(broker)
    broker.pass_ms(5000)
    assert reader.attempts() == [1]
    assert "dlq.t" not in broker.state.topics
    return broker, reader


@pytest.mark.parametrize("restart", ["clean", "crash"])
def test_a_burial_that_waits_for_room_survives_a_restart_once(restart: str):
    """driftq-39, 41."""
    broker, reader = dying_on_a_full_disk()
    if restart == "crash":
        broker.crash()
    else:
        broker.restart()
    again = broker.consume()
    broker.pass_ms(3000)
    assert "dlq.t" not in broker.state.topics
    make_room(broker)
    assert values(broker.stored("dlq.t")) == ["dying"]
    broker.pass_ms(3000)
    assert len(broker.stored("dlq.t")) == 1
    assert values(reader.items) == ["dying"]
    assert not again.items
    broker.close()


def test_a_late_nack_of_the_last_attempt_gives_it_a_reason_and_no_further_attempt():
    """driftq-39: after max_attempts deliveries never again, whatever its owner says late."""
    broker, reader = dying_on_a_full_disk()
    assert broker.nack(reader, 0, "too late") is None
    broker.pass_ms(3000)
    assert reader.attempts() == [1]
    check(broker.state)
    make_room(broker)
    envelope = broker.stored("dlq.t")[0].envelope
    assert envelope is not None
    assert envelope.dlq is not None
    assert envelope.dlq.last_error == "too late"
    assert reader.attempts() == [1]
    broker.close()


def test_a_late_ack_of_the_last_attempt_spares_it_the_dead_letters():
    """Its owner may ack until something else became of it."""
    broker, reader = dying_on_a_full_disk()
    assert broker.ack(reader, 0) is None
    make_room(broker)
    broker.pass_ms(3000)
    assert "dlq.t" not in broker.state.topics
    check(broker.state)
    broker.close()


def exhaust(broker: Broker, reader: Reader, item: int) -> None:
    """Uses up the reserve with nacks, until one is refused."""
    broker.disk.capacity_bytes = broker.disk.used_bytes
    broker.pass_ms(SPACE_CHECK_MS)
    for _ in range(200):
        outcome = broker.nack(reader, item, "x" * 4000)
        if isinstance(outcome, PenstockError):
            assert is_refused(outcome)
            return
    raise AssertionError("there is always room")


def fill_up(broker: Broker, reader: Reader, item: int) -> None:
    """Not even the smallest record finds room any more."""
    exhaust(broker, reader, item)
    while broker.nack(reader, item, "x") is None:
        pass


def test_an_ack_that_finds_no_room_fails_and_changes_nothing():
    """driftq-35."""
    broker = on_disk(options=TINY)
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    fill_up(broker, reader, 0)
    before = take_image(broker.state)
    assert is_refused(broker.ack(reader, 1))
    assert is_refused(broker.nack(reader, 1))
    assert is_refused(broker.call(broker.engine.create_topic, "new", 1))
    assert take_image(broker.state) == before
    check(broker.state)
    make_room(broker)
    assert broker.ack(reader, 1) is None
    assert broker.ack(reader, 0) is None
    broker.crash()
    assert broker.state.topics["t"].groups["g"].progress[0].floor() == 2
    broker.close()
