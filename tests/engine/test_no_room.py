"""Times in which nothing can be recorded: what comes due then is done as soon as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.core.invariants import check
from penstock.model.envelope import Envelope
from penstock.model.limits import KIB, Limits
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values


@contextmanager
def no_room(broker: Broker) -> Iterator[None]:
    """Nothing finds room: the segment is full, and the next one is not there yet."""
    broker.log.has_room = lambda nbytes, *, reserve=False: False
    yield
    del broker.log.has_room


NOT_LONG_MS = 300
"""The next segment is there again before the broker has looked at the disk."""
SOON_MS = 2500

brief_or_long = pytest.mark.parametrize("missing_ms", [NOT_LONG_MS, 5000])


@brief_or_long
def test_leases_that_ended_without_room_end_when_there_is_room(missing_ms: int):
    """driftq-36, 49: nothing is forgotten over a time in which nothing could be recorded."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=100)
    with no_room(broker):
        broker.pass_ms(missing_ms)
    broker.pass_ms(SOON_MS)
    assert {"a", "b"} <= set(values(reader.items[2:]))
    check(broker.state)
    broker.close()


@brief_or_long
def test_what_a_paused_consumer_held_goes_elsewhere_when_there_is_room(missing_ms: int):
    """driftq-24, 49: it was paused while nothing could be recorded."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(lease_ms=100, owner="slow")
    broker.give_unwritten(slow, "a")
    with no_room(broker):
        slow.live.pause()
        broker.pass_ms(missing_ms)
    other = broker.consume(lease_ms=LONG_MS, owner="other")
    broker.pass_ms(SOON_MS)
    assert values(other.items) == ["a"]
    check(broker.state)
    broker.close()


@brief_or_long
def test_what_a_closed_consumer_held_goes_elsewhere_when_there_is_room(missing_ms: int):
    """driftq-25, 49: it was paused, and then left, while nothing could be recorded."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(lease_ms=1000, owner="slow")
    broker.give_unwritten(slow, "a")
    with no_room(broker):
        slow.live.pause()
        broker.settle()
        slow.live.close()
        broker.pass_ms(missing_ms)
    other = broker.consume(lease_ms=LONG_MS, owner="other")
    broker.pass_ms(SOON_MS)
    assert values(other.items) == ["a"]
    check(broker.state)
    broker.close()


@brief_or_long
def test_a_consumer_that_goes_before_its_items_are_durable_keeps_nothing(missing_ms: int):
    """driftq-25, 49: its lease had not begun, and there was no room to give the items back."""
    broker = on_disk()
    broker.topic()
    gone = broker.consume(lease_ms=1000, owner="gone")
    broker.submit(broker.engine.produce, broker.command("t", "a"))
    broker.scheduler._turns.popleft()()
    assert len(gone.live.unwritten) == 1
    with no_room(broker):
        gone.live.close()
        broker.settle()
        broker.pass_ms(missing_ms)
    other = broker.consume(lease_ms=LONG_MS, owner="other")
    broker.pass_ms(SOON_MS)
    assert not gone.items
    assert values(other.items) == ["a"]
    assert other.attempts() == [1]
    check(broker.state)
    broker.close()


@brief_or_long
def test_a_lease_that_ends_before_an_item_is_given_back_costs_it_no_attempt(missing_ms: int):
    """driftq-25, 39, 49: it never left, so it is not dead after its only attempt."""
    broker = on_disk()
    broker.topic()
    gone = broker.consume(lease_ms=100, owner="gone")
    broker.submit(broker.engine.produce, broker.command("t", "a", envelope=policy(1)))
    broker.scheduler._turns.popleft()()
    with no_room(broker):
        gone.live.pause()
        broker.settle()
        gone.live.close()
        broker.pass_ms(missing_ms)
    other = broker.consume(lease_ms=LONG_MS, owner="other")
    broker.pass_ms(SOON_MS)
    assert not gone.items
    assert values(other.items) == ["a"]
    assert other.attempts() == [1]
    check(broker.state)
    broker.close()


@brief_or_long
def test_what_found_no_room_is_delivered_when_there_is_some(missing_ms: int):
    """driftq-49: no later produce or ack is needed to remind the broker."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS, prefetch=1)
    with no_room(broker):
        other = Reader("t", "g", "other")
        outcomes = broker.submit(broker.engine.open_consumer, "t", "g", "other", LONG_MS, 0, other)
        broker.pass_ms(missing_ms)
    other.consumer = outcomes[0]
    broker.pass_ms(SOON_MS)
    assert values(reader.items + other.items) == ["a", "b"]
    broker.close()


@brief_or_long
def test_a_burial_that_found_no_room_is_done_when_there_is_some(missing_ms: int):
    """driftq-41."""
    broker = on_disk()
    broker.topic()
    broker.produce("t", "a", envelope=policy(1))
    broker.consume(lease_ms=100)
    with no_room(broker):
        broker.pass_ms(missing_ms)
    broker.pass_ms(SOON_MS)
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_a_message_whose_effect_is_committed_is_skipped_when_there_is_room():
    """driftq-61, 49."""
    broker = on_disk()
    broker.topic()
    for n in range(3):
        broker.produce("t", f"v{n}", envelope=Envelope(idempotency_key=f"k{n}"))
    assert broker.begin("k1") is None
    assert broker.commit("k1") is None
    reader = broker.consume(lease_ms=LONG_MS, prefetch=1)
    assert values(reader.items) == ["v0"]
    with no_room(broker):
        reader.live.prefetch = 10
        reader.live.resume()
        broker.pass_ms(NOT_LONG_MS)
    broker.pass_ms(SOON_MS)
    assert values(reader.items) == ["v0", "v2"]
    check(broker.state)
    broker.close()


def test_a_redelivery_whose_effect_is_committed_is_skipped_when_there_is_room():
    """driftq-61, 49: and the broker rests until then."""
    broker = on_disk(limits=Limits(max_in_flight=1))
    broker.topic()
    broker.produce("t", "a", envelope=Envelope(idempotency_key="k"))
    reader = broker.consume(lease_ms=LONG_MS)
    reader.live.pause()
    assert broker.nack(reader, 0) is None
    assert broker.begin("k") is None
    assert broker.commit("k") is None
    with no_room(broker):
        reader.live.resume()
        broker.pass_ms(NOT_LONG_MS)
    broker.pass_ms(SOON_MS)
    assert reader.attempts() == [1]
    assert broker.state.topics["t"].groups["g"].progress[0].floor() == 1
    broker.close()


ONE_PAGE = Limits(memory_bytes=8 * KIB, lease_ms=100)
"""Of messages of 4 KiB memory has one, and the cache of pages another."""


def put_large(broker: Broker, max_attempts: int = 0) -> None:
    broker.topic()
    for n in range(4):
        broker.produce("t", f"{n} ".ljust(4 * KIB, "."), envelope=policy(max_attempts))


@contextmanager
def no_room_and_hardly_a_read(broker: Broker) -> Iterator[None]:
    pages = broker.engine.parts.pages
    reads = pages.reads
    with no_room(broker):
        yield
        broker.pass_ms(5000)
    assert pages.reads - reads < 50
    broker.pass_ms(SOON_MS)


def test_burials_that_wait_for_room_are_not_read_over_and_over():
    """driftq-41, 49."""
    broker = on_disk(limits=ONE_PAGE)
    put_large(broker, max_attempts=1)
    reader = broker.consume()
    assert reader.offsets() == [0, 1, 2, 3]
    with no_room_and_hardly_a_read(broker):
        pass
    assert sorted(value[0] for value in values(broker.stored("dlq.t"))) == ["0", "1", "2", "3"]
    check(broker.state)
    broker.close()


def test_redeliveries_that_wait_for_room_are_not_read_over_and_over():
    """driftq-49."""
    broker = on_disk(limits=ONE_PAGE)
    put_large(broker)
    reader = broker.consume(lease_ms=LONG_MS)
    reader.live.pause()
    for item in reader.take():
        assert broker.nack(reader, item) is None
    with no_room_and_hardly_a_read(broker):
        reader.live.resume()
    assert sorted(reader.offsets()) == [0, 1, 2, 3]
    check(broker.state)
    broker.close()


def test_first_deliveries_that_wait_for_room_are_not_read_over_and_over():
    """driftq-49."""
    broker = on_disk(limits=ONE_PAGE)
    put_large(broker)
    reader = broker.consume(lease_ms=LONG_MS, prefetch=1)
    with no_room_and_hardly_a_read(broker):
        reader.live.prefetch = 0
        reader.live.resume()
    assert reader.offsets() == [0, 1, 2, 3]
    check(broker.state)
    broker.close()
