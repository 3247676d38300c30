"""Consumers that do not read, or go: what never left goes elsewhere, uncounted."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.core.invariants import check
from penstock.model.errors import FailedPrecondition
from penstock.model.item import Item
from penstock.model.limits import MAX_UNWRITTEN_BYTES, Limits
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values


@pytest.mark.parametrize("waiting", [0, 1])
def test_what_was_not_written_goes_to_another_consumer_at_once_when_the_connection_closes(
    waiting: int,
):
    """driftq-25: with its attempt uncounted, whether the other came before or after."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    broker.give_unwritten(slow, "a", "b")
    others = [Reader("t", "g", "other") for _ in range(waiting)]
    for other in others:
        broker.submit(broker.engine.open_consumer, "t", "g", "other", LONG_MS, 0, other)
    slow.live.close()
    broker.settle()
    if not waiting:
        others = [broker.consume(owner="other", lease_ms=LONG_MS)]
    assert values(others[0].items) == ["a", "b"]
    assert others[0].attempts() == [1, 1]
    assert [item.last_error for item in others[0].items] == ["", ""]
    assert not slow.items
    check(broker.state)
    broker.close()


def test_what_a_full_connection_cannot_take_goes_to_another_consumer_at_once():
    """driftq-24: the slow one holds up nobody, and what it could not take is uncounted."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    broker.give_unwritten(slow, "a", "b")
    slow.live.pause()
    broker.settle()
    assert not slow.live.unwritten
    other = broker.consume(owner="other", lease_ms=LONG_MS)
    assert values(other.items) == ["a", "b"]
    assert other.attempts() == [1, 1]
    slow.live.resume()
    broker.settle()
    assert not slow.items, "they are leased to another now"
    check(broker.state)
    broker.close()


def two_readers_and_one_full(*, stuck: int) -> tuple[Broker, list[Reader]]:
    """Eight messages are decided, in turn for two readers, and the connection of one is full by
    the time they are durable."""
    broker = on_disk()
    broker.topic()
    readers = [broker.consume(owner=name, lease_ms=LONG_MS) for name in ("one", "two")]
    for n in range(8):
        broker.submit(broker.engine.produce, broker.command("t", f"v{n}"))
    broker.scheduler._turns.popleft()()
    assert all(len(reader.live.unwritten) == 4 for reader in readers)
    readers[stuck].live.pause()
    return broker, readers


@pytest.mark.parametrize("stuck", [0, 1])
def test_first_deliveries_leave_in_offset_order_past_a_full_connection(stuck: int):
    """driftq-22: none leaves while one before it, which the full connection was to have, has
    not."""
    broker, readers = two_readers_and_one_full(stuck=stuck)
    broker.settle()
    assert readers[1 - stuck].offsets() == list(range(8))
    assert readers[1 - stuck].attempts() == [1] * 8
    assert not readers[stuck].items
    check(broker.state)
    broker.close()


@pytest.mark.parametrize("stuck", [0, 1])
def test_returned_deliveries_go_before_later_ones(stuck: int):
    """driftq-22: nor when it is on its way to the disk at that moment."""
    broker, readers = two_readers_and_one_full(stuck=stuck)
    for n in range(8, 12):
        broker.submit(broker.engine.produce, broker.command("t", f"v{n}"))
    broker.settle()
    assert readers[1 - stuck].offsets() == list(range(12))
    readers[stuck].live.resume()
    broker.put("t", "v12", "v13")
    assert sorted(readers[0].offsets() + readers[1].offsets()) == list(range(14))
    check(broker.state)
    broker.close()


def test_with_every_connection_full_the_messages_wait_for_the_first_that_is_not():
    """driftq-22, 24."""
    broker, readers = two_readers_and_one_full(stuck=0)
    readers[1].live.pause()
    broker.settle()
    assert not readers[0].items
    assert not readers[1].items
    readers[1].live.resume()
    broker.settle()
    assert readers[1].offsets() == list(range(8))
    check(broker.state)
    broker.close()


def test_an_uncounted_delivery_does_not_use_up_the_last_attempt():
    """driftq-25, 39."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=1000)
    broker.submit(broker.engine.produce, broker.command("t", "a", envelope=policy(1)))
    broker.scheduler._turns.popleft()()
    slow.live.pause()
    broker.settle()
    for _ in range(3):
        broker.pass_ms(1010)
    assert "dlq.t" not in broker.state.topics
    other = broker.consume(owner="other", lease_ms=1000)
    assert other.attempts() == [1]
    broker.pass_ms(1010)
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_what_was_written_waits_for_its_lease_and_its_owner_may_still_ack():
    """driftq-25."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a", "b")
    gone = broker.consume(owner="gone", lease_ms=1000)
    gone.live.close()
    other = broker.consume(owner="other", lease_ms=LONG_MS)
    assert not other.items
    assert broker.ack(gone, 0) is None
    broker.pass_ms(1010)
    assert values(other.items) == ["b"]
    assert (other.items[0].attempts, other.items[0].last_error) == (2, "ack_timeout")
    broker.close()


def test_an_owner_that_never_got_the_item_may_not_ack_it():
    """driftq-29: returned uncounted, it was never delivered."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    broker.give_unwritten(slow, "a")
    slow.live.pause()
    broker.settle()
    assert isinstance(broker.ack(slow, 0), FailedPrecondition)
    broker.close()


def test_a_returned_redelivery_leaves_the_earlier_owner_in_place():
    """Settled: the last owner, of the last delivery that counts, may ack late."""
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    first = broker.consume(owner="first", lease_ms=LONG_MS)
    first.live.close()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    nack = partial(broker.engine.nack, delay_ms=0)
    broker.submit(nack, broker.naming(first, 0), "why")
    broker.scheduler._turns.popleft()()
    assert len(slow.live.unwritten) == 1
    slow.live.pause()
    broker.settle()
    check(broker.state)
    assert isinstance(broker.ack(slow, 0), FailedPrecondition)
    assert broker.nack(first, 0, "still") is None
    other = broker.consume(owner="other", lease_ms=LONG_MS)
    item = other.one()
    assert (item.attempts, item.last_error) == (2, "still"), "and the late nack delays nothing"
    broker.close()


def test_returns_survive_a_clean_restart_uncounted():
    """driftq-25, 44: a stopping broker is a closed connection."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    broker.give_unwritten(slow, "a", "b")
    broker.restart()
    other = broker.consume(owner="other", lease_ms=LONG_MS)
    assert values(other.items) == ["a", "b"]
    assert other.attempts() == [1, 1]
    broker.close()


def test_a_crash_counts_deliveries_that_may_have_been_sent_never_fewer():
    """driftq-44."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    broker.give_unwritten(slow, "a")
    broker.settle()
    assert slow.attempts() == [1]
    broker.crash()
    other = broker.consume(owner="other", lease_ms=LONG_MS)
    assert other.attempts() == [2]
    broker.close()


def test_a_consumer_that_resumes_has_its_whole_lease_from_then_on():
    """driftq-24: what waited for a full connection was not yet in its hands."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=1000)
    broker.give_unwritten(slow, "a")
    slow.live.pause()
    broker.pass_ms(5000)
    slow.live.resume()
    broker.settle()
    assert values(slow.items) == ["a"]
    broker.pass_ms(999)
    assert slow.attempts() == [1]
    broker.pass_ms(11)
    assert slow.attempts() == [1, 2]
    broker.close()


def test_a_paused_consumer_is_given_nothing_and_holds_up_nobody():
    """driftq-24: the others get everything."""
    broker = on_disk(limits=Limits(max_in_flight=1000))
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=LONG_MS)
    quick = broker.consume(owner="quick", lease_ms=LONG_MS)
    slow.live.pause()
    broker.put("t", *[f"v{n}" for n in range(50)])
    assert not slow.items
    assert values(quick.items) == [f"v{n}" for n in range(50)]
    broker.close()


class Watching(Reader):
    """Notes the most that was handed to it at once."""

    most = 0

    def write(self, items: list[Item]) -> None:
        self.most = max(self.most, sum(len(item.value) for item in items))
        super().write(items)


def test_what_is_decided_for_one_consumer_and_not_written_is_bounded_in_bytes():
    """driftq-24: the memory for one stream stays bounded, whatever the backlog."""
    broker = on_disk()
    broker.topic()
    broker.put("t", *["x" * 100_000 for _ in range(30)])
    reader = Watching("t", "g", "o")
    broker.consume(lease_ms=LONG_MS, reader=reader)
    assert len(reader.items) == 30
    assert reader.most <= MAX_UNWRITTEN_BYTES + 100_000
    broker.close()


def test_many_pauses_leave_nothing_behind():
    """driftq-24: a paused consumer keeps nothing."""
    broker = on_disk()
    broker.topic()
    slow = broker.consume(owner="slow", lease_ms=100)
    for n in range(20):
        broker.give_unwritten(slow, f"v{n}")
        slow.live.pause()
        broker.pass_ms(120)
        slow.live.resume()
        broker.settle()
        for item in slow.take():
            assert broker.ack(slow, item) is None
    assert not slow.live.unwritten
    assert slow.live.unwritten_bytes == 0
    assert slow.live.outstanding == 0
    check(broker.state)
    broker.close()
