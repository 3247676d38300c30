"""Release at the seam: a delivery that nobody began to handle goes back, uncounted."""

from __future__ import annotations

import pytest

from penstock.core.comparison import comparable
from penstock.core.image import (
    EntryImage,
    StateImage,
    decode_image,
    encode_image,
    restore_image,
    take_image,
)
from penstock.core.invariants import check
from penstock.model.errors import FailedPrecondition, Unavailable
from penstock.model.limits import Limits
from tests.engine.harness import LONG_MS, Broker, on_disk, policy, values


def test_a_release_never_dead_letters_even_the_only_attempt():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.produce("t", "a", envelope=policy(max_attempts=1))
    for _ in range(5):
        item = reader.one()
        assert item.attempts == 1
        assert broker.release(reader, item) is None
    assert "dlq.t" not in broker.state.topics
    assert broker.nack(reader, reader.one()) is None
    assert values(broker.stored("dlq.t")) == ["a"]
    broker.close()


def test_released_deliveries_come_in_their_old_order_before_what_was_never_delivered():
    broker = on_disk(limits=Limits(max_in_flight=4))
    broker.topic()
    broker.put("t", *"abcdef")
    reader = broker.consume(lease_ms=LONG_MS)
    a, b, c, d = reader.take()
    reader.live.close()
    broker.settle()
    for item in (d, b, c, a):
        assert broker.release(reader, item) is None
    other = broker.consume(owner="p", lease_ms=LONG_MS, prefetch=1)
    seen = []
    for _ in range(6):
        item = other.one()
        seen.append((item.value, item.attempts))
        assert broker.ack(other, item) is None
    assert seen == [(value, 1) for value in "abcdef"]
    broker.close()


def test_a_released_retry_keeps_its_attempts_and_last_error():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.produce("t", "a", envelope=policy(max_attempts=3, backoff_ms=10))
    assert broker.nack(reader, reader.one(), "it broke") is None
    broker.pass_ms(20)
    retry = reader.one()
    assert (retry.attempts, retry.last_error) == (2, "it broke")
    assert broker.release(reader, retry) is None
    again = reader.one()
    assert (again.attempts, again.last_error) == (2, "it broke")
    broker.close()


def test_an_ack_of_the_released_delivery_does_not_finish_the_next_one():
    """`attempts` goes back with a release, the fencing token does not."""
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.put("t", "a")
    released = reader.one()
    assert broker.release(reader, released, delivery_id=released.delivery_id) is None
    again = reader.one()
    assert again.attempts == released.attempts
    assert again.delivery_id != released.delivery_id
    for settle in (broker.ack, broker.nack, broker.release):
        stale = settle(reader, released, delivery_id=released.delivery_id)
        assert isinstance(stale, FailedPrecondition)
    assert broker.in_flight() == 1
    assert broker.ack(reader, again, delivery_id=again.delivery_id) is None
    broker.close()


def test_delivery_ids_are_never_used_again_over_releases_and_restarts():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    seen: set[str] = set()
    for turn in range(6):
        reader = broker.consume(lease_ms=LONG_MS, owner=f"o{turn}")
        item = reader.one()
        assert item.delivery_id not in seen
        seen.add(item.delivery_id)
        reader.live.close()
        assert broker.release(reader, item) is None
        if turn % 2:
            broker.restart()
    broker.close()


def test_after_a_release_the_owner_before_may_still_ack_with_its_delivery_id():
    """As after a delivery that never left: the last owner is who it was before."""
    broker = on_disk()
    broker.topic()
    first = broker.consume(owner="first", lease_ms=100)
    broker.put("t", "a")
    late = first.one()
    first.live.close()
    broker.pass_ms(200)
    second = broker.consume(owner="second", lease_ms=LONG_MS)
    item = second.one()
    second.live.close()
    assert broker.release(second, item) is None
    stale = broker.ack(second, item, delivery_id=item.delivery_id)
    assert isinstance(stale, FailedPrecondition)
    assert broker.ack(first, late, delivery_id=late.delivery_id) is None
    broker.close()


def test_what_is_not_leased_to_the_owner_is_not_released():
    broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=100)
    broker.put("t", "a", "b", "c")
    a, b, c = reader.take()
    reader.live.close()
    assert isinstance(broker.release(reader, a, owner="thief"), FailedPrecondition)
    assert isinstance(broker.release(reader, 17), FailedPrecondition)
    assert broker.ack(reader, b) is None
    done = broker.release(reader, b)
    assert isinstance(done, FailedPrecondition)
    assert "done" in done.message
    assert broker.release(reader, c) is None
    for again in (broker.release(reader, c), broker.ack(reader, c)):
        assert isinstance(again, FailedPrecondition)
        assert "not in flight" in again.message
    broker.pass_ms(200)
    before = take_image(broker.state)
    ended = broker.release(reader, a)
    assert isinstance(ended, FailedPrecondition)
    assert "lease has ended" in ended.message
    assert take_image(broker.state) == before
    broker.close()


def test_a_batch_of_releases_is_one_commit_and_each_stands_alone():
    broker = on_disk()
    broker.topic("t", 2)
    for n in range(6):
        broker.produce("t", str(n), key=f"k{n}")
    reader = broker.consume(lease_ms=LONG_MS)
    items = sorted(reader.take(), key=lambda item: item.offset)
    reader.live.close()
    broker.settle()
    commands = [broker.naming(reader, item) for item in reversed(items)]
    commands.insert(2, broker.naming(reader, items[0], owner="thief"))
    commands.append(commands[-1])
    frames = broker.log.durable_seq
    outcomes = broker.must(broker.engine.release_many, commands)
    refused = [n for n, outcome in enumerate(outcomes) if outcome is not None]
    assert refused == [2, 7]
    assert all(isinstance(outcomes[n], FailedPrecondition) for n in refused)
    assert broker.log.durable_seq == frames + 1
    other = broker.consume(owner="p", lease_ms=LONG_MS)
    for partition in (0, 1):
        mine = [item.offset for item in other.items if item.partition == partition]
        assert mine == sorted(mine)
    assert [item.attempts for item in other.take()] == [1] * 6
    broker.close()


def test_a_release_frees_its_place_for_others_at_once():
    """driftq-34: the same turn uses it."""
    broker = on_disk(limits=Limits(max_in_flight=1))
    broker.topic()
    broker.put("t", "a", "b")
    reader = broker.consume(lease_ms=LONG_MS, prefetch=1)
    item = reader.one()
    other = broker.consume(owner="p", lease_ms=LONG_MS, prefetch=1)
    assert broker.release(reader, item) is None
    assert values(other.items) == ["a"]
    broker.close()


def test_released_messages_are_the_same_after_a_restart():
    broker = on_disk()
    broker.topic()
    broker.put("t", *"abc")
    reader = broker.consume(lease_ms=LONG_MS)
    a, b, c = reader.take()
    reader.live.close()
    assert broker.release(reader, b) is None
    assert broker.release(reader, a) is None
    assert broker.ack(reader, c) is None
    now_ms = broker.clock.now_ms()
    live = comparable(take_image(broker.state), now_ms)
    broker.restart()
    assert comparable(take_image(broker.state), now_ms) == live
    again = broker.consume(owner="p", lease_ms=LONG_MS)
    assert [(item.value, item.attempts) for item in again.take()] == [("a", 1), ("b", 1)]
    broker.close()


def test_without_room_a_release_is_refused_and_the_lease_stays():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=LONG_MS)
    item = reader.one()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker.log, "has_room", lambda size, *, reserve=False: False)
        assert isinstance(broker.release(reader, item), Unavailable)
    assert broker.in_flight() == 1
    assert not reader.items
    assert broker.release(reader, item) is None
    assert reader.one().attempts == 1
    broker.close()


def test_an_image_from_before_deliveries_were_numbered_goes_on_from_its_attempts():
    broker = on_disk()
    broker.topic()
    broker.put("t", "a")
    reader = broker.consume(lease_ms=100)
    reader.one()
    broker.pass_ms(110)
    assert reader.one().attempts == 2
    image = take_image(broker.state)
    for entry in _entries(image):
        entry.deliveries = entry.delivery = entry.previous_delivery = 0
    state = restore_image(decode_image(encode_image(image)), broker.engine.limits)
    check(state)
    held = state.topics["t"].groups["g"].progress[0].unfinished[0]
    assert (held.attempts, held.delivery, held.deliveries) == (2, 2, 2)
    broker.close()


def _entries(image: StateImage) -> list[EntryImage]:
    return [
        entry
        for topic in image.topics
        for group in topic.groups
        for progress in group.progress
        for entry in progress.unfinished
    ]


def test_a_release_through_a_second_stream_of_the_owner_stops_an_unwritten_item():
    """Decided and not yet durable: it is returned, and the connection does not get it."""
    broker: Broker = on_disk()
    broker.topic()
    reader = broker.consume(lease_ms=LONG_MS)
    broker.give_unwritten(reader, "a")
    outcomes = broker.submit(broker.engine.release, broker.naming(reader, 0))
    broker.settle()
    assert outcomes == [None]
    assert [item.attempts for item in reader.take()] == [1]
    check(broker.state)
    broker.close()
