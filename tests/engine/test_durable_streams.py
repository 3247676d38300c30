"""Durable streams: events are stored, delivered until they are acked, and can be read again."""

from __future__ import annotations

import pytest

from penstock.core.invariants import check
from penstock.model.errors import (
    FailedPrecondition,
    NotFound,
    NotYet,
    OutOfRange,
    PenstockError,
    ResourceExhausted,
)
from penstock.model.limits import Limits
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.streams import Publish, Start, Subscribe
from penstock.model.tenancy import Entry, StreamConfig
from penstock.storage.log import WalOptions
from tests.engine.durable_stream_harness import EARLIEST, LATEST, Listener, Streams, payloads
from tests.engine.harness import LEASE_MS, SMALL, Broker
from tests.storage.faulty_vfs import FaultyVfs
from tests.thresholds import Threshold, lowered

ODD = [b"", b"\xff\xfe\x00", bytes(range(256)), b"plain"]


@pytest.mark.parametrize("how", ["kill", "seal_and_crash", "restart"])
def test_accepted_events_reach_a_subscription_after_a_crash(how):
    """felix-109, 118: whatever bytes they have, in order, and from the log as from history."""
    broker = Streams()
    broker.named(start=EARLIEST).live.close()
    offsets = [broker.publish(event) for event in ODD]
    assert offsets == [0, 1, 2, 3]
    getattr(broker, how)()
    reader = broker.named()
    assert broker.ack_all(reader) == ODD
    check(broker.state)


def test_a_subscriber_goes_on_behind_its_last_ack():
    """felix-110, 119: what was acked is not delivered again, what was not is."""
    broker = Streams()
    reader = broker.named()
    broker.publish(b"a", b"b", b"c", b"d")
    a, _, c, _ = reader.take()
    assert broker.ack_item(reader, a) is None
    assert broker.ack_item(reader, c) is None
    broker.seal_and_crash()
    again = broker.named(owner="w2")
    items = sorted(again.take(), key=lambda item: item.offset)
    assert [(item.offset, item.attempts) for item in items] == [(1, 2), (3, 2)]
    assert payloads(items) == [b"b", b"d"]


def test_an_event_that_is_not_acked_is_delivered_again():
    """felix-119, 121: with the same offset and the next attempt; a nack's reason comes with it."""
    broker = Streams()
    reader = broker.named()
    broker.publish(b"a")
    first = reader.one()
    broker.pass_ms(LEASE_MS)
    second = reader.one()
    assert (second.offset, second.attempts) == (first.offset, 2)
    assert second.delivery_id != first.delivery_id
    outcome = broker.nack(reader, first.offset, "no", delivery_id=second.delivery_id)
    assert outcome is None
    broker.pass_ms(60_000)
    third = reader.take()[0]
    assert (third.attempts, third.last_error) == (3, "no")


def test_attempts_never_end():
    """Streams have no dead letters: an event stays until it is acked."""
    broker = Streams()
    reader = broker.named()
    broker.publish(b"a")
    for _ in range(50):
        broker.pass_ms(LEASE_MS)
    assert reader.items[-1].attempts > 40
    assert broker.call(broker.engine.list_topics, DEFAULT_SCOPE) == []


def test_names_share_and_differ():
    """Those who use one name share its events; every name gets all."""
    broker = Streams()
    one, two = broker.named(owner="w1"), broker.named(owner="w2")
    other = broker.named("audit")
    broker.publish(*[b"%d" % n for n in range(10)])
    assert sorted(payloads(one.items) + payloads(two.items)) == [b"%d" % n for n in range(10)]
    assert one.items
    assert two.items
    assert payloads(other.items) == [b"%d" % n for n in range(10)]


def test_a_new_name_begins_where_it_says():
    """Latest by default, earliest, an offset or a time; an existing name ignores it."""
    broker = Streams()
    broker.publish(b"a", b"b")
    broker.seal()
    broker.clock.advance(1000)
    since = broker.clock.now_ms()
    broker.publish(b"c")
    broker.publish(b"d")
    starts = {
        "latest": LATEST,
        "earliest": EARLIEST,
        "offset": Start("offset", 1),
        "end": Start("offset", 4),
        "time": Start("time", since),
        "later": Start("time", since + 10_000),
    }
    readers = {name: broker.named(name, start=start) for name, start in starts.items()}
    broker.publish(b"e")
    check(broker.state)
    found = {name: broker.ack_all(reader) for name, reader in readers.items()}
    assert found == {
        "latest": [b"e"],
        "earliest": [b"a", b"b", b"c", b"d", b"e"],
        "offset": [b"b", b"c", b"d", b"e"],
        "end": [b"e"],
        "time": [b"c", b"d", b"e"],
        "later": [b"e"],
    }
    check(broker.state)
    again = broker.named("offset", owner="w2", start=EARLIEST)
    assert again.items == []


@pytest.mark.parametrize("name", [None, "new"])
def test_a_cursor_out_of_range_is_an_error(name):
    """felix-126: not a silent skip."""
    broker = Streams(config={"retention_ms": 1000})
    broker.publish(b"a", b"b")
    broker.pass_ms(5000)
    broker.publish(b"c")

    def begin(start: Start) -> None:
        if name is None:
            broker.listen(start)
        else:
            broker.named(name, start=start)

    with pytest.raises(OutOfRange, match="below 2 are no longer kept") as found:
        begin(Start("offset", 1))
    assert found.value.http_status == 410
    with pytest.raises(NotYet, match="ends at offset 3") as found:
        begin(Start("offset", 4))
    assert found.value.http_status == 416
    begin(Start("offset", 3))


def test_retention_waits_for_named_subscriptions_only():
    """felix-126: by age and by bytes. A subscription that is behind keeps what it needs."""
    broker = Streams(config={"retention_ms": 1000})
    reader = broker.named(lease_ms=60_000)
    broker.publish(b"a", b"b")
    broker.pass_ms(5000)
    partition = broker.state.topics[broker.log_name].partitions[0]
    assert partition.first_offset == 0
    assert set(broker.ack_all(reader)) == {b"a", b"b"}
    broker.pass_ms(5000)
    assert partition.first_offset == 2
    broker.path = broker.create("small", retention_bytes=300)
    for _ in range(20):
        broker.publish(bytes(100))
    broker.pass_ms(2000)
    kept = broker.state.topics[broker.log_name].partitions[0]
    assert kept.first_offset == 17
    check(broker.state)


def test_retention_follows_the_streams_settings():
    broker = Streams()
    config = StreamConfig(delivery="at_least_once", durable=True, retention_ms=7, retention_bytes=9)

    def change(done):
        broker.engine.registry.change(broker.path, done, stream=config)

    broker.must(change)
    topic = broker.state.topics[broker.log_name]
    assert (topic.retention_ms, topic.retention_bytes) == (7, 9)
    check(broker.state)


def test_plain_subscribers_hear_of_durable_events_only():
    """Live, at most once, and not before the event is on disk."""
    broker = Streams()
    early = broker.listen()
    broker.hold_writes()
    answers = broker.submit(
        broker.engine.streams.publish, Publish(path=broker.path, payloads=[b"a"])
    )
    broker.scheduler.run()
    assert (answers, early.events) == ([], [])
    broker.disk.release()
    broker.settle()
    assert (answers, early.events, early.offsets) == ([0], [b"a"], [0])
    late = broker.listen()
    broker.publish(b"b", b"c")
    assert early.events == [b"a", b"b", b"c"]
    assert (late.events, late.offsets) == ([b"b", b"c"], [1, 2])


def test_a_replay_joins_live_events():
    """Without a gap or a repeat, from history, the log and memory."""
    broker = Streams()
    events = [b"%d" % n for n in range(50)]
    broker.publish(*events[:10])
    broker.seal()
    broker.publish(*events[10:20])
    reader = broker.listen(EARLIEST)
    stalled = broker.listen(Start("offset", 5), is_stalled=True)
    for event in events[20:]:
        broker.publish(event)
    assert reader.events == events
    assert reader.offsets == list(range(50))
    stalled.is_stalled = False
    while len(stalled.events) < 45:
        stalled.read()
        broker.settle()
    assert stalled.events == events[5:]
    assert broker.listen(LATEST).events == []


def test_a_replay_that_falls_below_retention_ends():
    """felix-126: 410, not a gap."""
    small = (
        Threshold("engine.event_reading", "READ_EVENTS", 4),
        Threshold("engine.window", "CHUNK_MSGS", 3),
    )
    with lowered(small):
        broker = Streams(config={"retention_ms": 1000})
        broker.publish(*[b"%d" % n for n in range(30)])
        slow = broker.listen(EARLIEST, is_stalled=True)
        slow.read(1)
        broker.pass_ms(5000)
        while not slow.ends:
            slow.read(1)
            broker.settle()
    assert isinstance(slow.ends[0], OutOfRange)
    assert slow.events == [b"%d" % n for n in range(len(slow.events))]


def test_backlog_of_the_slowest_name_limits_publishing():
    """Without a named subscription nothing is owed, and history may grow."""
    broker = Streams(limits=Limits(max_partition_msgs=3, lease_ms=LEASE_MS))
    for _ in range(5):
        broker.publish(b"x")
    reader = broker.named()
    broker.publish(b"a", b"b")
    refused = broker.try_publish(b"c", b"d")
    assert isinstance(refused, ResourceExhausted)
    broker.ack_item(reader, reader.items[0])
    assert broker.publish(b"c", b"d") == 7
    check(broker.state)


def test_a_batch_is_stored_whole_or_not():
    """A crash keeps all events of a publish, or none."""
    for flavour in ("nothing", "everything", "torn"):
        broker = Streams()
        broker.publish(b"before")
        broker.hold_writes()
        broker.submit(
            broker.engine.streams.publish,
            Publish(path=broker.path, payloads=[b"%d" % n for n in range(100)]),
        )
        broker.scheduler.run()
        broker.crash(flavour)
        end = broker.state.topics[broker.log_name].next_offset
        assert end in (1, 101)


@pytest.mark.parametrize("fsync", ["none", "interval", "memory"])
def test_storage_that_loses_events_refuses_durable_streams(fsync):
    """felix-120: and says what would be lost."""
    if fsync == "memory":
        broker = Broker()
    else:
        options = WalOptions(segment_bytes=SMALL.segment_bytes, reserve_bytes=0, fsync=fsync)
        broker = Broker(FaultyVfs(), options=options)
    wanted = Entry(
        kind="stream",
        tenant_id="default",
        namespace="default",
        name="orders",
        stream=StreamConfig(delivery="at_least_once", durable=True),
    )
    refused = broker.call(broker.engine.registry.create, wanted)
    assert isinstance(refused, FailedPrecondition)
    assert "would be lost" in refused.message
    assert "--memory" in refused.message or "--fsync commit" in refused.message


def test_a_start_with_weaker_storage_is_refused():
    """felix-120: existing durable streams are never weakened silently."""
    broker = Streams()
    broker.close()
    broker.options = WalOptions(segment_bytes=SMALL.segment_bytes, reserve_bytes=0, fsync="none")
    with pytest.raises(FailedPrecondition, match=r"acme/prod/orders.*--fsync commit"):
        broker.open()


def test_ephemeral_streams_write_nothing():
    """felix-127: durable and ephemeral streams coexist."""
    broker = Streams()
    durable, broker.path = broker.path, broker.create("live", "at_most_once", durable=False)
    before = broker.log.seq
    assert broker.publish(b"a") is None
    broker.settle()
    assert broker.log.seq == before
    with pytest.raises(FailedPrecondition, match="keeps no events"):
        broker.named()
    with pytest.raises(FailedPrecondition, match="keeps no events"):
        broker.listen(EARLIEST)
    broker.path = durable
    assert broker.publish(b"a") == 0


def test_a_kept_stream_may_be_replayed_but_not_acked():
    broker = Streams(delivery="at_most_once")
    broker.publish(b"a")
    assert broker.listen(EARLIEST).events == [b"a"]
    with pytest.raises(FailedPrecondition, match="at_least_once"):
        broker.named()


def test_deleting_a_stream_ends_all_of_it():
    broker = Streams()
    reader, replay, live = broker.named(), broker.listen(EARLIEST), broker.listen()
    broker.publish(b"a")
    broker.must(broker.engine.registry.delete, "tenant", ("acme", "", ""), True)
    assert reader.ended
    assert replay.ends
    assert live.ends
    assert broker.state.topics == {}
    check(broker.state)
    broker.seal_and_crash()
    check(broker.state)
    outcome = broker.call(broker.engine.streams.subscribe, Subscribe(path=broker.path), replay)
    assert isinstance(outcome, PenstockError)


@pytest.mark.parametrize("order", ["fans out first", "is durable first"])
def test_deleting_a_stream_refuses_publishes_that_wait(order):
    """They are not let in while the deletion is on its way to disk: their log is gone."""
    broker = Streams(config={"pub_queue_depth": 1})
    broker.listen()
    streams = broker.engine.streams
    streams.hold_fanout()
    command = Publish(path=broker.path, payloads=[b"a"])
    answers = [broker.submit(streams.publish, command) for _ in range(3)]
    broker.settle()
    assert answers == [[0], [], []]
    broker.hold_writes()
    deleted = broker.submit(broker.engine.registry.delete, "stream", broker.path, False)
    broker.scheduler.run()
    if order == "fans out first":
        streams.release_fanout()
        broker.scheduler.run()
    assert (answers[1], deleted) == ([], []), "a refusal waits until the deletion is durable"
    broker.disk.release()
    streams.release_fanout()
    broker.settle()
    assert deleted == [None]
    assert [type(outcome) for (outcome,) in answers[1:]] == [NotFound, NotFound]
    broker.create("orders")
    assert broker.publish(b"b") == 0
    check(broker.state)


def test_a_stream_that_is_made_again_begins_empty():
    broker = Streams()
    broker.named(start=EARLIEST)
    broker.publish(b"a")
    broker.must(broker.engine.registry.delete, "stream", broker.path, False)
    broker.create("orders")
    assert broker.publish(b"b") == 0
    assert broker.named(start=EARLIEST).items[0].value == b"b"
    check(broker.state)


@pytest.mark.parametrize("start", [None, LATEST], ids=["live", "latest"])
def test_a_subscription_begins_at_an_offset_that_is_durable(start):
    """Or a crash could leave the log shorter than the position that its reader goes on from."""
    broker = Streams()
    broker.publish(b"a")
    broker.hold_writes()
    broker.submit(broker.engine.streams.publish, Publish(path=broker.path, payloads=[b"b"]))
    listener = Listener()
    command = Subscribe(path=broker.path, start=start)
    confirmed = broker.submit(broker.engine.streams.subscribe, command, listener)
    later = Publish(path=broker.path, payloads=[b"c"])
    broker.submit(broker.engine.streams.publish, later)
    broker.scheduler.run()
    assert confirmed == []
    broker.disk.release()
    broker.settle()
    (listener.subscription,) = confirmed
    listener.wake()
    broker.settle()
    assert listener.subscription.begins_at == 2
    assert (listener.events, listener.offsets) == ([b"c"], [2])


@pytest.mark.parametrize("start", [None, EARLIEST], ids=["live", "earliest"])
def test_a_subscription_to_a_stream_that_is_deleted_meanwhile_hears_of_it(start):
    """It is refused, or is confirmed and ended."""
    broker = Streams()
    broker.hold_writes()
    broker.submit(broker.engine.streams.publish, Publish(path=broker.path, payloads=[b"a"]))
    listener = Listener()
    command = Subscribe(path=broker.path, start=start)
    found = broker.submit(broker.engine.streams.subscribe, command, listener)
    broker.submit(broker.engine.registry.delete, "stream", broker.path, False)
    broker.disk.release()
    broker.settle()
    assert NotFound in [type(each) for each in found + listener.ends]
