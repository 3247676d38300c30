"""Delivery of streams: at most once, in order, to everybody who is subscribed."""

from __future__ import annotations

import random

import pytest

from penstock.core.stream_rules import BURST_EVENTS
from penstock.engine.streams import TURN_OFFERS
from penstock.model.errors import InvalidArgument, NotFound, TooLarge
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_QUEUE_DEPTH, MIB, Limits
from penstock.model.streams import Publish, Subscribe
from tests.engine.stream_harness import SECOND, Bank, Listener, S, numbers


def test_every_event_is_seen_once():
    """felix-1, 9: byte for byte, whatever is in it."""
    bank = Bank()
    reader = bank.subscribe()
    events = [*numbers(0, 300), b"", bytes(range(256))]
    bank.publish_each(*events)
    assert reader.events == events
    bank.pass_ms(3_600_000)
    assert reader.events == events


def test_what_overflowed_never_comes():
    """felix-5, 21, 24: the oldest stay, and what follows the gap comes as ever."""
    bank = Bank(event_queue_depth=4)
    slow = bank.stalled()
    bank.publish_each(*numbers(0, 10))
    slow.is_stalled = False
    slow.read()
    bank.publish_each(*numbers(10, 13))
    bank.pass_ms(60_000)
    assert slow.events == [*numbers(0, 4), *numbers(10, 13)]
    assert slow.live.lag().dropped == 6


def test_what_a_departed_reader_left_goes_to_nobody():
    """felix-7, 43: nor to the one that takes its place."""
    bank = Bank()
    gone = bank.stalled()
    bank.publish_each(*numbers(0, 3))
    gone.live.close()
    replacement = bank.subscribe()
    bank.settle()
    assert replacement.events == []
    assert gone.live.take(100) == []


def test_a_publish_without_subscribers_leaves_nothing_behind():
    """felix-10."""
    bank = Bank()
    bank.publish(b"early")
    late = bank.subscribe()
    bank.settle()
    assert late.events == []
    assert bank.queued() == (0, 0)


def test_one_publishers_events_keep_their_order():
    """felix-11, 14: one by one and in batches, however they are taken."""
    bank = Bank()
    at_once, in_bits = bank.subscribe(), bank.stalled()
    events = numbers(0, 500)
    start, rng = 0, random.Random(7)
    while start < len(events):
        end = start + rng.choice([1, 1, 2, 7, 64])
        bank.send(*events[start:end])
        if rng.random() < 0.3:
            bank.settle()
            in_bits.read(rng.randrange(1, 40))
        start = end
    bank.settle()
    in_bits.read()
    assert at_once.events == in_bits.events == events


def test_under_drops_the_order_holds():
    """felix-15."""
    bank = Bank(event_queue_depth=8)
    slow = bank.stalled()
    rng = random.Random(3)
    for n in range(0, 400, 5):
        bank.publish(*numbers(n, n + 5))
        slow.read(rng.randrange(6))
    slow.read()
    received = [int(event) for event in slow.events]
    assert received == sorted(set(received))
    assert 0 < slow.live.lag().dropped == 400 - len(received)


def test_a_backlog_of_one_stream_does_not_delay_another():
    """felix-16: they take turns."""
    bank = Bank()
    bank.subscribe()
    other = bank.subscribe(SECOND)
    bank.streams.hold_fanout()
    bank.send(*numbers(0, 4 * BURST_EVENTS))
    bank.send(b"mine", path=SECOND)
    bank.streams.release_fanout()
    bank.broker.scheduler._turns.popleft()()
    assert other.events == [b"mine"]
    assert bank.queued()[0] == 3 * BURST_EVENTS


def test_a_large_audience_is_served_over_several_turns():
    """felix-18: the loop is not held, and nobody is left out or served twice."""
    bank = Bank()
    readers = [bank.subscribe() for _ in range(TURN_OFFERS + 10)]
    bank.streams.hold_fanout()
    bank.send(b"1")
    bank.send(b"2")
    bank.streams.release_fanout()
    bank.broker.scheduler._turns.popleft()()
    assert sum(len(reader.events) for reader in readers) == TURN_OFFERS
    readers[-1].live.close()
    late = bank.subscribe()
    bank.settle()
    assert all(reader.events == [b"1", b"2"] for reader in readers[:-1])
    assert readers[-1].events == late.events == []
    assert readers[-1].behind == 0


def test_each_subscription_has_a_buffer_of_its_own():
    """felix-19, 23: and a depth of its own, if it asks for one."""
    bank = Bank(event_queue_depth=8)
    plain, small, large = bank.stalled(), *(bank.stalled(event_queue_depth=n) for n in (2, 12))
    bank.publish_each(*numbers(0, 20))
    assert plain.read() == numbers(0, 8)
    assert small.read() == numbers(0, 2)
    assert large.read() == numbers(0, 12)


@pytest.mark.parametrize("depth", [1024, 4096])
def test_a_stalled_reader_gets_as_much_as_its_depth(depth: int):
    """felix-20, 22, 23: 1024 unless it is set; who reads gets everything."""
    bank = Bank() if depth == 1024 else Bank(event_queue_depth=depth)
    slow, fast = bank.stalled(), bank.subscribe()
    events = numbers(0, depth + 100)
    bank.publish_each(*events)
    assert slow.read() == events[:depth]
    assert slow.live.lag().dropped == 100
    assert fast.events == events


def test_the_brokers_depth_holds_where_the_stream_has_none():
    """felix-23."""
    bank = Bank(limits=Limits(event_queue_depth=3))
    slow = bank.stalled()
    bank.publish_each(*numbers(0, 5))
    assert slow.read() == numbers(0, 3)


def test_a_batch_that_half_fits_keeps_its_beginning():
    """felix-20: depths count events."""
    bank = Bank(event_queue_depth=6)
    slow = bank.stalled()
    bank.publish(*numbers(0, 4))
    bank.publish(*numbers(4, 8))
    assert slow.read() == numbers(0, 6)
    bank.publish(*numbers(8, 10))
    assert slow.read() == numbers(8, 10)


@pytest.mark.parametrize("size", [BURST_EVENTS, BURST_EVENTS + 1, 1024, 1025, MAX_BATCH_ITEMS])
def test_a_reader_that_keeps_up_gets_a_batch_of_any_size(size: int):
    """felix-22: even one larger than its buffer, since it reads between the bursts."""
    bank = Bank()
    fast, slow = bank.subscribe(), bank.stalled()
    bank.publish(*numbers(0, size))
    assert fast.events == numbers(0, size)
    assert slow.read() == numbers(0, min(size, 1024))


def test_bytes_are_bounded_too():
    """felix-26: and an event that is larger than the buffer still passes an empty one."""
    bank = Bank(event_queue_bytes=100)
    slow = bank.stalled()
    bank.publish(b"a" * 60, b"b" * 30, b"c" * 20, b"d")
    assert [event[:1] for event in slow.read()] == [b"a", b"b"]
    bank.publish(b"e" * 200, b"f")
    assert [event[:1] for event in slow.read()] == [b"e"]


def test_memory_is_bounded_however_much_is_published():
    """felix-26: a reader that takes one of each large batch keeps none of the rest alive."""
    bank = Bank(event_queue_depth=32)
    slow = bank.stalled()
    for _ in range(100):
        bank.publish(*(bytes(1000) for _ in range(64)))
        slow.read(1)
    held = {id(run.batch): run.batch for run in slow.live._buffer._runs}
    kept = sum(len(payload) for batch in held.values() for payload in batch.payloads)
    assert slow.behind == 31
    assert kept <= 64 * 1000, "whole batches are kept alive by one event of each"


def test_nothing_crosses_over():
    """felix-25: not between streams, nor namespaces, nor tenants of the same names."""
    bank = Bank()
    paths = [S, SECOND, bank.add(("acme", "test", "s")), bank.add(("other", "prod", "s"))]
    readers = {path: bank.subscribe(path) for path in paths}
    for n, path in enumerate(paths):
        bank.publish(b"%d" % n, path=path)
    assert [readers[path].events for path in paths] == [[b"0"], [b"1"], [b"2"], [b"3"]]


def test_a_closed_subscription_is_gone_at_once():
    """felix-41: also when it closes in the middle of a burst."""
    bank = Bank()
    first, second = bank.stalled(), bank.stalled()
    bank.publish(b"1")
    assert bank.counts().subscribers == 2
    first.live.close()
    first.live.close()
    assert bank.counts().subscribers == 1
    outcome = bank.broker.call(bank.streams.subscriptions, S)
    assert [lag.subscription_id for lag in outcome] == [second.live.id]
    bank.publish(b"2")
    assert first.behind == 0
    assert first.wakes == 1


def test_a_closed_subscriptions_events_are_released():
    """felix-42."""
    bank = Bank()
    slow = bank.stalled()
    bank.publish(*numbers(0, 10))
    [run] = slow.live._buffer._runs
    slow.live.close()
    assert not slow.live._buffer._runs
    assert slow.behind == slow.live._buffer.nbytes == 0
    assert run.payloads == numbers(0, 10)


def test_coming_and_going_leaves_nothing_behind():
    """felix-41, 42: nor does a reader that was behind, or slow, or to be woken."""
    bank = Bank(event_queue_depth=4, lag_alert_events=2, disconnect_slow_ms=1000)
    for n in range(500):
        listener = bank.stalled()
        bank.publish(*numbers(0, 8))
        if n % 2:
            bank.send(b"on its way")
        listener.live.close()
    bank.settle()
    counts = bank.counts()
    [stream] = [s for path, s in bank.streams._streams.items() if path == S]
    assert (counts.subscribers, counts.lagging) == (0, 0)
    assert not stream.subscriptions
    assert not stream._audience
    assert not bank.streams._woken
    assert not bank.streams._busy
    live = [timer for _, _, timer in bank.broker.scheduler._timers if timer.turn is not None]
    assert len(live) == 1, "only the broker's own housekeeping"


def test_a_new_subscription_starts_at_the_tail():
    """felix-45: what is in the queue when it is confirmed is not for it."""
    bank = Bank()
    early = bank.subscribe()
    bank.streams.hold_fanout()
    bank.send(b"1")
    bank.send(*numbers(2, 4))
    late = bank.subscribe()
    bank.send(b"4")
    bank.streams.release_fanout()
    bank.settle()
    assert early.events == [b"1", b"2", b"3", b"4"]
    assert late.events == [b"4"]


def test_a_sink_is_woken_once_until_it_has_taken_everything():
    """felix-3: and is not forgotten then."""
    bank = Bank()
    reader = bank.stalled()
    bank.publish_each(*numbers(0, 3))
    assert reader.wakes == 1
    reader.read(2)
    bank.publish(b"3")
    assert reader.wakes == 1, "it has not taken everything yet"
    reader.read()
    bank.publish(b"4")
    assert reader.wakes == 2
    assert reader.read() == [b"4"]
    bank.settle()
    assert reader.wakes == 2


def test_a_burst_wakes_a_sink_once():
    """felix-14: so that it may send many events as one."""
    bank = Bank()
    reader = bank.subscribe()
    for event in numbers(0, 100):
        bank.send(event)
    bank.settle()
    assert (reader.wakes, len(reader.events)) == (1, 100)


def test_who_takes_before_it_is_woken_is_woken_for_the_next():
    """felix-3: a reader that was paused may come back at any moment."""
    bank = Bank()
    late = Listener()

    class Hasty(Listener):
        def wake(self) -> None:
            super().wake()
            if self.wakes == 1:
                late.read()

    bank.subscribe(listener=Hasty())
    bank.subscribe(listener=late)
    bank.publish(b"1")
    assert (late.events, late.wakes) == ([b"1"], 0)
    bank.publish(b"2")
    assert (late.events, late.wakes) == ([b"1", b"2"], 1)


class Broken(Listener):
    def wake(self) -> None:
        super().wake()
        raise RuntimeError("the transport is closed")

    def lagging(self, lag: object) -> None:
        raise RuntimeError("the transport is closed")

    def ended(self, error: object) -> None:
        raise RuntimeError("the transport is closed")


def test_a_sink_that_raises_loses_its_own_subscription_only(caplog: pytest.LogCaptureFixture):
    """felix-22: and it is logged."""
    bank = Bank(lag_alert_events=1)
    before, after = bank.subscribe(), Listener()
    broken = bank.subscribe(listener=Broken())
    lagging = bank.subscribe(listener=Broken(stalled=True), wants_lag=True)
    bank.subscribe(listener=after)
    bank.publish(*numbers(0, 2))
    bank.publish(b"2")
    assert before.events == after.events == numbers(0, 3)
    assert broken.events == numbers(0, 2)
    assert broken.live.is_closed
    assert lagging.live.is_closed
    assert bank.counts().subscribers == 2
    assert bank.counts().lagging == 0
    assert "could not be told" in caplog.text


def test_a_subscriber_that_is_gone_before_it_is_confirmed_is_not_kept():
    """felix-41."""
    bank = Bank()

    def fail(_: object) -> None:
        raise RuntimeError("the client is gone")

    with pytest.raises(RuntimeError):
        bank.streams.subscribe(Subscribe(path=S), Listener(), fail)
    assert bank.counts().subscribers == 0


def test_a_publisher_that_is_gone_stops_nobody(caplog: pytest.LogCaptureFixture):
    """felix-46: what was accepted fans out."""
    bank = Bank()
    reader = bank.subscribe()

    def fail(_: object) -> None:
        raise RuntimeError("the client is gone")

    bank.streams.publish(Publish(path=S, payloads=[b"1"]), fail)
    bank.publish(b"2")
    assert reader.events == [b"1", b"2"]
    assert "could not be answered" in caplog.text


def test_payloads_have_their_limits():
    """felix-132: a clear error, and nothing of the batch is published."""
    bank = Bank(limits=Limits(max_message_bytes=10))
    reader = bank.subscribe()
    [refused] = bank.send(b"fine", b"x" * 11)
    assert isinstance(refused, TooLarge)
    assert "max_message_bytes is 10" in refused.message
    assert isinstance(bank.send()[0], InvalidArgument)
    assert isinstance(bank.send(*[b""] * (MAX_BATCH_ITEMS + 1))[0], InvalidArgument)
    bank.publish(b"x" * 10, b"x" * 10)
    assert reader.events == [b"x" * 10] * 2


@pytest.mark.parametrize("depth", [0, -1, MAX_QUEUE_DEPTH + 1])
def test_a_depth_out_of_range_is_refused(depth: int):
    """felix-23."""
    bank = Bank()
    with pytest.raises(InvalidArgument, match="event_queue_depth"):
        bank.subscribe(event_queue_depth=depth)
    bank.subscribe(event_queue_depth=MAX_QUEUE_DEPTH)
    assert bank.counts().subscribers == 1


def test_subscribers_of_large_events_that_keep_up_lose_nothing():
    """felix-22: a burst is bounded in bytes, too."""
    bank = Bank(event_queue_bytes=3 * MIB)
    fast = bank.subscribe()
    bank.publish(*(bytes([n]) * MIB for n in range(20)))
    assert [event[0] for event in fast.events] == list(range(20))


def test_counts_say_what_happened():
    """felix-115."""
    bank = Bank(event_queue_depth=3)
    bank.subscribe()
    bank.stalled()
    bank.publish_each(*numbers(0, 5))
    counts = bank.counts()
    assert (counts.published, counts.delivered, counts.dropped) == (5, 5, 2)
    assert counts.subscribers == 2


def test_using_an_unknown_stream_creates_nothing():
    """felix-92."""
    bank, path = Bank(), ("acme", "prod", "nothing")
    [refused] = bank.send(b"1", path=path)
    assert isinstance(refused, NotFound)
    with pytest.raises(NotFound, match="stream not found: 'acme/prod/nothing'"):
        bank.subscribe(path)
    assert isinstance(bank.broker.call(bank.streams.subscriptions, path), NotFound)
    assert bank.streams.metrics() == []
