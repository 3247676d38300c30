"""An image holds all durable state: a restored state continues exactly as the old one."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cache import CacheEntry
from penstock.core.comparison import comparable
from penstock.core.groups import DYING, IN_FLIGHT, READY, WAITING
from penstock.core.image import decode_image, encode_image, restore_image, take_image
from penstock.core.invariants import check
from penstock.core.settle import LAPSED
from penstock.core.state import BrokerState
from penstock.engine.leases import Leases
from penstock.model.envelope import RetryPolicy
from penstock.model.records import (
    COMMITTED,
    DEAD,
    EXPIRED,
    CacheRemoved,
    CacheStored,
    Delivered,
    DeliveredItem,
    EffectSet,
    GroupCreated,
    Message,
    Record,
    RegistryChanged,
    Released,
    Returned,
    TopicCreated,
    encode_record,
)
from penstock.model.tenancy import CacheConfig, Entry
from tests.storage.random_broker import LIMITS, RandomBroker, Step, long_histories, replayed, steps

# Where they are in the arrays of an image (docs/storage-format.md).
TOPICS, GROUPS, PROGRESS, UNFINISHED = 2, 7, 3, 7


def restored(state: BrokerState) -> BrokerState:
    return restore_image(decode_image(encode_image(take_image(state))), LIMITS)


def derived(state: BrokerState) -> list[object]:
    """What restoring has to work out again."""
    return [
        (
            progress.in_flight,
            list(progress.ready),
            sorted(group.open_effects.items()),
            topic.partitions[progress.partition].backlog.buffered_msgs(),
            topic.partitions[progress.partition].backlog.buffered_bytes(),
            topic.effects.text_bytes,
        )
        for topic in sorted(state.topics.values(), key=lambda topic: topic.id)
        for group in sorted(topic.groups.values(), key=lambda group: group.id)
        for progress in group.progress
    ]


def waiting(state: BrokerState) -> list[int]:
    return sorted(
        entry.offset
        for group in state.groups.values()
        for entry in group.unfinished()
        if entry.state == WAITING
    )


@settings(deadline=None)
@given(steps)
def test_an_image_is_equal_after_encoding_and_decoding(history: list[Step]):
    state = replayed(RandomBroker().live_through(history).log)
    again = restored(state)
    check(again)
    assert take_image(again) == take_image(state)
    assert derived(again) == derived(state)
    assert waiting(again) == waiting(state)


@settings(deadline=None)
@given(long_histories, st.floats(0, 1))
def test_continuing_from_an_image_equals_replaying_everything(history: list[Step], part: float):
    log = RandomBroker().live_through(history).log
    at = int(len(log) * part)
    resumed = replayed(log[at:], restored(replayed(log[:at])))
    whole = replayed(log)
    assert take_image(resumed) == take_image(whole)
    assert derived(resumed) == derived(whole)


@settings(deadline=None)
@given(long_histories)
def test_a_replayed_state_equals_the_live_one_except_for_what_has_expired(history: list[Step]):
    broker = RandomBroker().live_through(history)
    check(broker.state)
    live = comparable(take_image(broker.state), broker.now_ms)
    assert comparable(take_image(replayed(broker.log)), broker.now_ms) == live


@settings(deadline=None)
@given(steps)
def test_an_image_shares_nothing_with_the_state_it_was_taken_from(history: list[Step]):
    broker = RandomBroker().live_through(history[: len(history) // 2])
    image = take_image(broker.state)
    before = encode_image(image)
    broker.live_through(history[len(history) // 2 :])
    assert encode_image(image) == before


def some_state() -> BrokerState:
    """Four messages delivered to one group: in flight, waiting, ready, dying."""
    item = [DeliveredItem(n, 2, RetryPolicy(5, 10), "1/tk" if n < 2 else "") for n in range(4)]
    records: list[Record] = [
        TopicCreated(1, 100, "orders", 1),
        GroupCreated(2, 1, 100, "workers"),
        *(Message(1, 0, n, 100, "k", "v") for n in range(5)),
        Delivered(1, 2, 0, 100, "first", item),
        Released(1, 2, 0, 110, 1, "nack", 500),
        Released(1, 2, 0, 110, 2, LAPSED, 110),
        Released(1, 2, 0, 110, 3, "poison", DEAD),
        EffectSet(1, 120, "workers", "1/tk", COMMITTED, "first", 0, "done"),
    ]
    return replayed([encode_record(record) for record in records])


def test_unfinished_messages_keep_state_attempts_owner_error_and_schedule():
    progress = restored(some_state()).groups[2].progress[0]
    seen = {
        offset: (entry.state, entry.attempts, entry.owner, entry.last_error, entry.retry_at)
        for offset, entry in progress.unfinished.items()
    }
    assert seen == {
        0: (IN_FLIGHT, 1, "first", "", 0),
        1: (WAITING, 1, "first", "nack", 500),
        2: (READY, 1, "first", LAPSED, 0),
        3: (DYING, 1, "first", "poison", DEAD),
    }
    assert progress.unfinished[1].policy == RetryPolicy(5, 10)
    assert progress.cursor == 4


def test_a_delivery_keeps_its_time_and_has_none_in_an_older_image():
    state = some_state()
    assert {e.delivered_at for e in restored(state).groups[2].progress[0].unfinished.values()} == {
        100
    }
    image = msgspec.msgpack.decode(encode_image(take_image(state)))
    entries = image[TOPICS][0][GROUPS][0][PROGRESS][0][UNFINISHED]
    for entry in entries:
        del entry[-6:]
    old = restore_image(decode_image(msgspec.msgpack.encode(image)), LIMITS)
    unfinished = old.groups[2].progress[0].unfinished
    assert {entry.delivered_at for entry in unfinished.values()} == {0}
    assert [entry.owner for entry in unfinished.values()] == ["first"] * 4


def test_a_waiting_message_becomes_due_at_its_time_after_a_restore():
    state = restored(some_state())
    leases = Leases()
    leases.restore(state, 120)
    assert leases.ended(499) == []
    assert [entry.offset for entry in leases.ended(500)] == [1]


def test_a_returned_delivery_restores_the_previous_owner_after_a_restore():
    state = some_state()
    again = encode_record(Delivered(1, 2, 0, 130, "second", [DeliveredItem(2, 2)]))
    back = encode_record(Returned(1, 2, 0, 140, [2]))
    entry = replayed([back], restored(replayed([again], state))).groups[2].progress[0].unfinished[2]
    assert (entry.owner, entry.attempts, entry.state) == ("first", 1, READY)
    assert entry.delivered_at == 100


def test_an_effect_stays_open_while_its_messages_are_unfinished_after_a_restore():
    state = restored(some_state())
    group = state.groups[2]
    assert group.open_effects == {"1/tk": 2}
    effect = group.topic.effects.get("workers", "1/tk")
    assert effect is not None
    assert effect.text == "done"


def some_cache() -> BrokerState:
    """A durable cache: one entry written again, one that has expired, one that will."""
    entry = Entry(
        kind="cache",
        tenant_id="default",
        namespace="default",
        name="kept",
        id=9,
        revision=9,
        cache=CacheConfig(durable=True),
    )
    records: list[Record] = [
        RegistryChanged(100, entry),
        CacheStored(9, 101, "a", b"1", 100_001),
        CacheStored(9, 101, "over", b"1", 100_002, 105),
        CacheStored(9, 101, "later", b"1", 100_003, 500),
        CacheStored(9, 102, "gone", b"1", 100_004),
        CacheStored(9, 103, "a", b"\x00\xff", 100_005),
        CacheRemoved(9, 110, "gone", 100_006),
    ]
    return replayed([encode_record(record) for record in records])


def test_a_durable_cache_keeps_values_versions_and_expiry_but_no_expired_entries():
    cache = restored(some_cache()).caches[9]
    assert list(cache.entries.items()) == [
        ("later", CacheEntry(b"1", 100_003, 500)),
        ("a", CacheEntry(b"\x00\xff", 100_005)),
    ]
    assert cache.version == 100_006


def test_an_expired_entry_may_be_removed_after_the_image_left_it_out():
    state = restored(some_cache())
    replayed([encode_record(CacheRemoved(9, 120, "over", 100_007, EXPIRED))], state)
    assert state.caches[9].version == 100_007
    check(state)


def test_ids_of_deleted_topics_are_not_used_again_after_a_restore():
    assert restored(some_state()).next_id == 3
