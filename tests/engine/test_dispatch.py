"""Who is given what, and when: the sentences that show only where every turn is seen."""

from __future__ import annotations

import pytest

from penstock.core import topic_rules
from penstock.core.invariants import check
from penstock.engine import dispatcher
from penstock.model.envelope import Envelope
from penstock.model.errors import ResourceExhausted
from penstock.model.limits import Limits
from tests.engine.harness import LONG_MS, Broker, Reader, on_disk, policy, values


def in_partition(index: int) -> Envelope:
    return Envelope(partition_override=index)


def test_an_ack_frees_its_place_in_the_same_turn():
    """driftq-34: without waiting for a tick, and in the commit of the ack itself."""
    broker = on_disk(limits=Limits(max_in_flight=1))
    broker.topic()
    broker.put("t", "a", "b", "c")
    reader = broker.consume(lease_ms=LONG_MS)
    assert values(reader.items) == ["a"]
    commits = broker.log.commits
    assert broker.ack(reader, reader.one()) is None
    assert values(reader.take()) == ["b"]
    assert broker.log.commits == commits + 1
    broker.close()


def test_a_nack_frees_its_place_in_the_same_turn():
    """driftq-34: what waits for its backoff holds no place."""
    broker = on_disk(limits=Limits(max_in_flight=1))
    broker.topic()
    broker.produce("t", "a", envelope=policy(0, 5000))
    broker.put("t", "b")
    reader = broker.consume(lease_ms=LONG_MS)
    assert broker.nack(reader, reader.one()) is None
    assert values(reader.take()) == ["b"]
    broker.close()


def test_deliveries_go_round_the_consumers_that_can_take_more():
    """driftq-20."""
    broker = on_disk()
    broker.topic()
    readers = [broker.consume(owner=f"o{n}", lease_ms=LONG_MS) for n in range(3)]
    broker.put("t", *[f"v{n}" for n in range(9)])
    assert [values(reader.items) for reader in readers] == [
        ["v0", "v3", "v6"],
        ["v1", "v4", "v7"],
        ["v2", "v5", "v8"],
    ]
    broker.close()


def test_no_partition_starves_while_a_prefetch_is_used_up_by_another():
    """driftq-23: what could not be taken is given as soon as somebody can take it."""
    broker = on_disk()
    broker.topic("t", 3)
    for n in range(9):
        broker.produce("t", f"v{n}", envelope=in_partition(n % 3))
    reader = broker.consume(prefetch=1, lease_ms=LONG_MS)
    seen = []
    while reader.items:
        item = reader.one()
        seen.append(item.value)
        assert broker.ack(reader, item) is None
    assert sorted(seen) == [f"v{n}" for n in range(9)]
    broker.close()


def test_no_partition_starves_that_became_deliverable_during_a_pause():
    """driftq-24."""
    broker = on_disk()
    broker.topic("t", 2)
    reader = broker.consume(lease_ms=LONG_MS)
    reader.live.pause()
    broker.produce("t", "a", envelope=in_partition(0))
    broker.produce("t", "b", envelope=in_partition(1))
    assert not reader.items
    reader.live.resume()
    broker.settle()
    assert sorted(values(reader.items)) == ["a", "b"]
    broker.close()


def test_a_pause_between_a_produce_and_its_dispatch_forgets_nothing():
    """driftq-24: the partition was marked while the consumer could take, and served when not."""
    broker = on_disk()
    broker.topic("t", 2)
    reader = broker.consume(lease_ms=LONG_MS)
    for index in range(2):
        command = broker.command("t", f"v{index}", envelope=in_partition(index))
        broker.submit(broker.engine.produce, command)
    reader.live.pause()
    broker.settle()
    reader.live.resume()
    broker.settle()
    assert sorted(values(reader.items)) == ["v0", "v1"]
    broker.close()


def test_what_waits_for_its_backoff_is_bounded_and_costs_no_turns(monkeypatch: pytest.MonkeyPatch):
    """Beyond MAX_UNFINISHED nothing new is delivered; the broker rests, and goes on later."""
    monkeypatch.setattr(dispatcher, "MAX_UNFINISHED", 4)
    broker = on_disk()
    broker.topic()
    for n in range(6):
        broker.produce("t", f"v{n}", envelope=policy(0, 1000))
    reader = broker.consume(lease_ms=LONG_MS)
    seen = reader.take()
    assert values(seen) == ["v0", "v1", "v2", "v3"]
    for item in seen:
        assert broker.nack(reader, item) is None
    assert not reader.items
    broker.pass_ms(1010)
    for item in reader.take():
        assert broker.ack(reader, item) is None
    assert values(reader.items) == ["v4", "v5"]
    broker.close()


def test_burials_make_room_for_new_deliveries(monkeypatch: pytest.MonkeyPatch):
    """driftq-39: the group's progress moves on, also where the unfinished were too many."""
    monkeypatch.setattr(dispatcher, "MAX_UNFINISHED", 2)
    broker = on_disk()
    broker.topic()
    for n in range(5):
        broker.produce("t", f"v{n}", envelope=policy(1))
    reader = broker.consume(lease_ms=500)
    for _ in range(4):
        broker.pass_ms(600)
    assert values(reader.items) == [f"v{n}" for n in range(5)]
    check(broker.state)
    broker.close()


def test_redeliveries_that_are_read_from_disk_cost_no_turns_meanwhile():
    """The broker rests while the disk is read."""
    broker = on_disk(limits=Limits(max_in_flight=2, memory_bytes=2000))
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    for n in range(2):
        broker.produce("t", f"v{n}" * 300)
    for n in range(20):
        broker.produce("t", f"w{n}" * 300)
    seen = reader.take()
    assert len(seen) == 2
    broker.scheduler.is_holding_reads = True
    for item in seen:
        assert broker.nack(reader, item, delay_ms=0) is None
    assert broker.scheduler.held_reads, "nothing had to be read: the test is void"
    broker.scheduler.release_reads()
    broker.settle()
    assert [item.attempts for item in reader.items] == [2, 2]
    broker.close()


def test_the_dispatcher_forgets_a_group_with_its_last_consumer() -> None:
    """driftq-69: and frees the pages that were read for it."""
    broker = Broker()
    broker.topic()
    first = broker.consume(owner="a", lease_ms=LONG_MS)
    second = broker.consume(owner="b", lease_ms=LONG_MS)
    groups = broker.engine.parts.dispatcher._active
    first.live.close()
    assert len(groups.all()) == 1
    second.live.close()
    assert not groups.all()
    broker.put("t", "later")
    third = broker.consume(owner="c", lease_ms=LONG_MS)
    assert values(third.items) == ["later"]
    broker.close()


def test_a_new_message_concerns_only_groups_with_consumers() -> None:
    """However many groups a topic has: others are not looked at."""
    broker = Broker()
    broker.topic()
    broker.topic("other")
    for name in ("a", "b"):
        broker.consume(group=name).live.close()
    reader = broker.consume(group="c")
    broker.consume("other", group="d")
    groups = broker.engine.parts.dispatcher._active
    topic = broker.state.topics["t"]
    assert [each.group.name for each in groups.of_topic(topic.id)] == ["c"]
    broker.put("t", "x")
    assert [item.value for item in reader.take()] == ["x"]
    reader.live.close()
    assert not groups.of_topic(topic.id)
    assert [item.value for item in broker.consume(group="a").take()] == ["x"]


def test_groups_of_a_topic_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_rules, "MAX_GROUPS", 2)
    broker = Broker()
    broker.topic()
    broker.consume(group="a")
    broker.consume(group="b")
    refused = broker.call(broker.engine.open_consumer, "t", "c", "o", 0, 0, Reader("t", "c", "o"))
    assert isinstance(refused, ResourceExhausted)
    assert refused.limit == "groups"
    broker.consume(group="a", owner="another")
    broker.must(broker.engine.delete_group, "t", "b")
    broker.consume(group="c")
