"""What quotas count: what was accepted, once, and nothing that was refused or repeated."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.engine.limited_scope import RECOUNT_MS, SLOT_MS, RateMeter
from penstock.model.caching import Put
from penstock.model.envelope import Envelope
from penstock.model.errors import FailedPrecondition, PenstockError, ResourceExhausted
from penstock.model.scopes import Scope, full_name
from penstock.model.streams import Publish, Subscribe
from penstock.model.tenancy import CacheConfig, Entry, StreamConfig
from tests.engine.quota_harness import OTHER, PROD, Tenants, quota_of
from tests.engine.stream_harness import Listener
from tests.storage.faulty_vfs import FaultyVfs

EXHAUSTED: list[dict[str, int]] = [
    {"publish_rate_limit": 1},
    {"publish_bytes_limit": 10},
    {"disk_bytes": 10},
]


def numbered(sequence: int) -> dict[str, Any]:
    return {"producer_id": "p", "sequence": sequence}


@pytest.fixture
def tenants() -> Tenants:
    found = Tenants(FaultyVfs())
    found.add_durable(PROD, "exactly_once")
    return found


def used(tenants: Tenants, name: str, scope: Scope = PROD) -> int:
    return tenants.report(scope).used[name]


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize("limits", EXHAUSTED)
def test_a_repeat_is_answered_though_the_quota_is_used_up(
    tenants: Tenants, limits: dict[str, int], is_heard: bool
) -> None:
    """felix-122: and it is not charged. With a subscriber the publish goes through the queue."""
    if is_heard:
        subscribe = Subscribe(path=(*PROD, "d"))
        tenants.must(tenants.engine.streams.subscribe, subscribe, Listener())
    tenants.limit(PROD, **limits)
    assert tenants.publish_kept(PROD, b"x" * 10, **numbered(0)) == 0
    for _ in range(5):
        assert tenants.publish_kept(PROD, b"x" * 10, **numbered(0)) == 0
    (name,) = limits
    assert quota_of(tenants.publish_kept(PROD, b"y" * 10, **numbered(1))) == name
    if name != "disk_bytes":
        tenants.pass_ms(1000)
        assert tenants.publish_kept(PROD, b"y" * 10, **numbered(1)) == 1


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_refused_publish_charges_nothing(tenants: Tenants, is_heard: bool) -> None:
    if is_heard:
        subscribe = Subscribe(path=(*PROD, "d"))
        tenants.must(tenants.engine.streams.subscribe, subscribe, Listener())
    tenants.limit(PROD, publish_rate_limit=5)
    for _ in range(20):
        assert isinstance(tenants.publish_kept(PROD, **numbered(77)), FailedPrecondition)
    assert [tenants.publish_kept(PROD, **numbered(n)) for n in range(5)] == [0, 1, 2, 3, 4]
    assert used(tenants, "publish_rate_limit") == 5


def test_a_publish_that_finds_the_queue_full_charges_nothing(tenants: Tenants) -> None:
    config = StreamConfig(pub_queue_depth=2, publish_queue_wait_timeout_ms=50)
    tenants.create(
        Entry(kind="stream", tenant_id="acme", namespace="prod", name="f", stream=config)
    )
    tenants.limit(PROD, publish_rate_limit=4)
    tenants.engine.streams.hold_fanout()
    streams = tenants.engine.streams
    sent = [
        tenants.submit(streams.publish, Publish(path=(*PROD, "f"), payloads=[b"x"]))
        for _ in range(10)
    ]
    tenants.settle()
    assert [len(each) for each in sent] == [1, 1] + [0] * 8
    tenants.pass_ms(60)
    assert all(getattr(each[0], "limit", "") == "pub_queue_depth" for each in sent[2:])
    assert used(tenants, "publish_rate_limit") == 2
    streams.release_fanout()
    tenants.settle()


def test_publishes_that_waited_are_checked_when_they_are_accepted(tenants: Tenants) -> None:
    """felix-98: all of them passed the first check before any of them counted."""
    config = StreamConfig(pub_queue_depth=1, publish_queue_wait_timeout_ms=60_000)
    tenants.create(
        Entry(kind="stream", tenant_id="acme", namespace="prod", name="f", stream=config)
    )
    tenants.limit(PROD, publish_rate_limit=3)
    streams = tenants.engine.streams
    streams.hold_fanout()
    sent = [
        tenants.submit(streams.publish, Publish(path=(*PROD, "f"), payloads=[b"x"]))
        for _ in range(10)
    ]
    streams.release_fanout()
    tenants.settle()
    outcomes = [quota_of(each[0]) for each in sent]
    assert outcomes == [""] * 3 + ["publish_rate_limit"] * 7


def test_a_publish_does_not_wait_for_room_if_a_quota_refuses_it(tenants: Tenants) -> None:
    config = StreamConfig(pub_queue_depth=1, publish_queue_wait_timeout_ms=60_000)
    tenants.create(
        Entry(kind="stream", tenant_id="acme", namespace="prod", name="f", stream=config)
    )
    tenants.limit(PROD, publish_rate_limit=1)
    tenants.engine.streams.hold_fanout()
    command = Publish(path=(*PROD, "f"), payloads=[b"x"])
    assert tenants.call(tenants.engine.streams.publish, command) is None
    assert quota_of(tenants.call(tenants.engine.streams.publish, command)) == "publish_rate_limit"


def test_a_duplicate_produce_is_not_charged(tenants: Tenants) -> None:
    """driftq-28."""
    tenants.limit(PROD, publish_rate_limit=1)
    topic, key = full_name(PROD, "t"), Envelope(idempotency_key="k")
    assert not isinstance(tenants.try_produce(topic, "x", "", key), PenstockError)
    assert [tenants.try_produce(topic, "x", "", key) for _ in range(3)] == [None] * 3
    assert used(tenants, "publish_rate_limit") == 1


def test_a_produce_that_the_disk_refuses_is_not_charged(tenants: Tenants) -> None:
    tenants.limit(PROD, publish_rate_limit=5, disk_bytes=1000)
    log = tenants.log
    has_room, log.has_room = log.has_room, lambda *_, **__: False
    for _ in range(10):
        assert not isinstance(tenants.try_produce(full_name(PROD, "t"), "x"), ResourceExhausted)
        assert not isinstance(tenants.publish_kept(PROD, **numbered(0)), ResourceExhausted)
    log.has_room = has_room
    assert used(tenants, "publish_rate_limit") == 0
    assert [tenants.send(PROD) for _ in range(6)] == [""] * 5 + ["publish_rate_limit"]


def test_a_put_that_the_disk_refuses_is_not_charged(tenants: Tenants) -> None:
    tenants.create(_cache("kept", durable=True))
    tenants.limit(PROD, cache_memory=1000, disk_bytes=1000)
    put = Put((*PROD, "kept"), "k", b"x" * 300)
    log = tenants.log
    has_room, log.has_room = log.has_room, lambda *_, **__: False
    for _ in range(5):
        assert not isinstance(tenants.call(tenants.engine.caches.put, put), ResourceExhausted)
    log.has_room = has_room
    assert quota_of(tenants.call(tenants.engine.caches.put, put)) == ""


def test_durable_caches_count_as_disk(tenants: Tenants) -> None:
    tenants.create(_cache("kept", durable=True))
    tenants.limit(PROD, disk_bytes=1000)

    def put(cache: str, key: str) -> str:
        command = Put((*PROD, cache), key, b"x" * 100)
        return quota_of(tenants.call(tenants.engine.caches.put, command))

    assert [put("kept", key) for key in "abc"] == ["", "", "disk_bytes"]
    assert [put("c", key) for key in "abcdef"] == [""] * 6
    assert used(tenants, "disk_bytes") == sum(
        cache.bytes for cache in tenants.state.caches.values() if cache.is_durable
    )
    assert tenants.send(PROD, "x" * 400) == "disk_bytes"


def test_the_use_of_rates_is_what_was_accepted_in_the_last_second(tenants: Tenants) -> None:
    """felix-102."""
    tenants.limit(PROD, publish_rate_limit=100)
    assert "publish_rate_limit" not in tenants.report(OTHER).used
    for _ in range(3):
        tenants.send(PROD, "x" * 10)
    tenants.publish(PROD, b"12345", b"67890")
    assert used(tenants, "publish_rate_limit") == 5
    assert used(tenants, "publish_bytes_limit") == 40
    tenants.limit(PROD, publish_rate_limit=99)
    assert used(tenants, "publish_rate_limit") == 5
    tenants.pass_ms(1000)
    assert used(tenants, "publish_rate_limit") == 0


def test_a_rate_meter_keeps_one_second() -> None:
    meter = RateMeter()
    for now_ms in range(0, 3000, 10):
        meter.add(1, now_ms)
        assert meter.value(now_ms) <= 100
        if now_ms >= 1000:
            assert meter.value(now_ms) > 100 - SLOT_MS // 10
    assert meter.value(3000 + 10 * SLOT_MS) == 0
    assert meter.value(10**12) == 0


def test_what_grows_by_itself_is_noticed(tenants: Tenants) -> None:
    """Dead letters are copies, for which nobody is charged."""
    tenants.limit(PROD, disk_bytes=100)
    reader = tenants.consume(full_name(PROD, "t"), "g")
    for _ in range(3):
        assert tenants.send(PROD, "x" * 10) == ""
    for item in reader.take():
        assert tenants.nack(reader, item, dead=True) is None
    tenants.pass_ms(1000)
    assert used(tenants, "disk_bytes") == 60
    assert tenants.send(PROD, "x" * 50) == "disk_bytes"


def test_a_changed_limit_does_not_refill_the_rates(tenants: Tenants) -> None:
    tenants.limit(PROD, publish_rate_limit=2)
    assert [tenants.send(PROD) for _ in range(3)] == ["", "", "publish_rate_limit"]
    tenants.limit(PROD, publish_rate_limit=2, topics=9)
    assert tenants.send(PROD) == "publish_rate_limit"


@pytest.mark.parametrize(
    ("limits", "count"),
    [({"publish_rate_limit": 3}, 3), ({"publish_bytes_limit": 30}, 3), ({"disk_bytes": 30}, 3)],
)
def test_durable_publishes_are_limited(
    tenants: Tenants, limits: dict[str, int], count: int
) -> None:
    """felix-98: the streams' logs count like topics."""
    tenants.limit(PROD, **limits)
    (name,) = limits
    outcomes = [tenants.publish_kept(PROD, b"x" * 10, **numbered(n)) for n in range(count + 1)]
    assert outcomes[:count] == list(range(count))
    assert quota_of(outcomes[count]) == name
    assert used(tenants, name) == limits[name]


def test_the_backlog_of_a_durable_stream_is_that_of_its_subscriptions(tenants: Tenants) -> None:
    tenants.limit(PROD, backlog_msgs=3)
    for n in range(6):
        assert tenants.publish_kept(PROD, **numbered(n)) == n
        tenants.pass_ms(RECOUNT_MS)
    assert used(tenants, "backlog_msgs") == 0


def _stream(name: str, config: StreamConfig) -> Entry:
    return Entry(kind="stream", tenant_id="acme", namespace="prod", name=name, stream=config)


def _cache(name: str, **config: Any) -> Entry:
    return Entry(
        kind="cache", tenant_id="acme", namespace="prod", name=name, cache=CacheConfig(**config)
    )


def test_idempotency_keys_are_limited_and_those_of_deleted_topics_count(tenants: Tenants) -> None:
    """felix-102: what one tenant remembers leaves room for the others."""
    topic = full_name(PROD, "t")

    def send(key: str, name: str = topic) -> str:
        return quota_of(tenants.try_produce(name, "x", "", Envelope(idempotency_key=key)))

    tenants.limit(("acme", ""), idempotency_keys=3)
    assert [send(key) for key in "abca"] == ["", "", "", ""]
    assert send("d") == "idempotency_keys"
    assert tenants.send(PROD) == ""
    assert send("d", full_name(OTHER, "t")) == ""
    tenants.crash()
    assert used(tenants, "idempotency_keys", ("acme", "")) == 3
    tenants.must(tenants.engine.delete_topic, topic)
    tenants.topic(topic)
    assert used(tenants, "idempotency_keys") == 3
    assert send("e") == "idempotency_keys"
    tenants.pass_ms(tenants.limits.idempotency_ttl_ms)
    assert [send(key) for key in "abcd"] == ["", "", "", "idempotency_keys"]


def test_keys_of_a_deleted_namespace_count_for_its_tenant_only(tenants: Tenants) -> None:
    test, key = ("acme", "test"), Envelope(idempotency_key="k")
    tenants.must(tenants.engine.produce, Produce(full_name(test, "t"), "", "x", key))
    entry = Entry(kind="namespace", tenant_id="acme", namespace="test")
    delete = tenants.engine.registry.delete
    tenants.must(delete, "namespace", (*test, ""), True)
    tenants.create(entry)
    assert used(tenants, "idempotency_keys", test) == 0
    assert used(tenants, "idempotency_keys", ("acme", "")) == 1
