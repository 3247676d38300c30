"""Quotas: what a tenant or namespace may use, on a clock that the tests drive."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock.api.messages import Settle
from penstock.engine.limited_scope import RECOUNT_MS, RateBucket, UseMargin
from penstock.model.caching import Delete, Watch
from penstock.model.errors import OutOfRange, ResourceExhausted
from penstock.model.scopes import Scope, full_name, stream_log_name
from penstock.model.streams import Start, Subscribe, SubscribeNamed
from tests.engine.cache_harness import Watcher
from tests.engine.durable_stream_harness import EventReader
from tests.engine.harness import Reader
from tests.engine.quota_harness import OTHER, PROD, Tenants, quota_of
from tests.engine.stream_harness import Listener
from tests.storage.faulty_vfs import FaultyVfs


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


@pytest.mark.parametrize("scope", [PROD, ("acme", "")])
def test_a_rate_is_refused_beyond_its_limit_and_recovers(tenants: Tenants, scope: Scope) -> None:
    """felix-98, 102."""
    tenants.limit(scope, publish_rate_limit=10)
    assert [tenants.send(PROD) for _ in range(11)] == [""] * 10 + ["publish_rate_limit"]
    assert tenants.publish(PROD) == "publish_rate_limit"
    assert tenants.send(OTHER) == ""
    assert tenants.publish(OTHER) == ""
    tenants.pass_ms(100)
    assert [tenants.send(PROD), tenants.send(PROD)] == ["", "publish_rate_limit"]


def test_a_refusal_says_when_to_try_again(tenants: Tenants) -> None:
    """felix-98."""
    tenants.limit(PROD, publish_rate_limit=4)
    for _ in range(4):
        tenants.send(PROD)
    refused = tenants.try_produce(full_name(PROD, "t"), "x")
    assert isinstance(refused, ResourceExhausted)
    tenants.pass_ms(refused.retry_after_ms)
    assert tenants.send(PROD) == ""


def test_a_batch_larger_than_the_limit_is_paid_back(tenants: Tenants) -> None:
    """felix-98."""
    tenants.limit(PROD, publish_rate_limit=10)
    assert tenants.publish(PROD, *[b"x"] * 30) == ""
    tenants.pass_ms(1900)
    assert tenants.publish(PROD) == "publish_rate_limit"
    tenants.pass_ms(200)
    assert tenants.publish(PROD) == ""


def test_bytes_have_a_rate_of_their_own(tenants: Tenants) -> None:
    tenants.limit(PROD, publish_bytes_limit=100)
    assert [tenants.send(PROD, "x" * 60) for _ in range(3)] == ["", "", "publish_bytes_limit"]


def test_no_history_is_accepted_faster_than_the_rate() -> None:
    """felix-98: over any time, at most the rate, one burst and one batch."""
    for seed in range(20):
        dice = random.Random(seed)
        rate, now_ms, accepted = dice.randint(1, 50), 0, 0
        bucket = RateBucket(rate, now_ms)
        for _ in range(500):
            now_ms += dice.choice([0, 0, 1, 7, 50, 400])
            batch = dice.choice([1, 1, 1, 5, 200])
            if not bucket.wait_ms(now_ms):
                bucket.take(batch)
                accepted += batch
            assert accepted <= rate * now_ms / 1000 + rate + 200


def test_topics_of_a_namespace_are_limited(tenants: Tenants) -> None:
    tenants.limit(("acme", ""), topics=3)
    tenants.topic(full_name(PROD, "third"))
    create = tenants.engine.create_topic
    assert quota_of(tenants.call(create, full_name(PROD, "fourth"), 1)) == "topics"
    assert quota_of(tenants.call(create, full_name(OTHER, "fourth"), 1)) == ""
    tenants.must(tenants.engine.delete_topic, full_name(PROD, "third"))
    assert quota_of(tenants.call(create, full_name(PROD, "fourth"), 1)) == ""


def test_subscriptions_consumers_and_watches_share_a_limit(tenants: Tenants) -> None:
    """felix-99."""
    tenants.limit(PROD, subscribe_connections=3)
    listeners = [Listener() for _ in range(2)]
    opened = [_subscribe(tenants, PROD, listener) for listener in listeners]
    reader = tenants.consume(full_name(PROD, "t"), "g")
    assert tenants.report(PROD).used["subscribe_connections"] == 3
    assert quota_of(_subscribe(tenants, PROD, Listener())) == "subscribe_connections"
    assert quota_of(_watch(tenants, PROD)) == "subscribe_connections"
    assert quota_of(_consume(tenants, PROD)) == "subscribe_connections"
    assert quota_of(_subscribe(tenants, OTHER, Listener())) == ""
    opened[0].close()
    watch = _watch(tenants, PROD)
    assert quota_of(watch) == ""
    reader.live.close()
    assert quota_of(_consume(tenants, PROD)) == ""
    watch.close()
    opened[1].close()
    tenants.must(tenants.engine.delete_topic, full_name(PROD, "t"))
    assert tenants.report(PROD).used["subscribe_connections"] == 0


def _subscribe(tenants: Tenants, scope: Scope, listener: Listener) -> Any:
    return tenants.call(tenants.engine.streams.subscribe, Subscribe(path=(*scope, "s")), listener)


def _watch(tenants: Tenants, scope: Scope) -> Any:
    command = Watch(path=(*scope, "c"), key="k")
    return tenants.call(tenants.engine.caches.watch, command, Watcher())


def _consume(tenants: Tenants, scope: Scope) -> Any:
    name = full_name(scope, "t")
    sink = Listener()
    return tenants.call(tenants.engine.open_consumer, name, "g", "o", 1000, 0, sink)


def test_cache_memory_is_refused_and_only_for_that_tenant(tenants: Tenants) -> None:
    """felix-100."""
    tenants.limit(("acme", ""), cache_memory=1000)
    assert [tenants.put(PROD, f"k{n}", b"x" * 100) for n in range(3)] == ["", "", "cache_memory"]
    assert tenants.put(("acme", "test"), "k", b"x" * 100) == "cache_memory"
    assert tenants.put(OTHER, "k", b"x" * 5000) == ""
    assert tenants.put(PROD, "k0", b"y" * 100) == ""
    tenants.must(tenants.engine.caches.delete, Delete((*PROD, "c"), "k0"))
    tenants.pass_ms(RECOUNT_MS)
    assert tenants.put(PROD, "k2", b"x" * 100) == ""


@pytest.mark.parametrize(
    ("limits", "count"), [({"backlog_msgs": 3}, 3), ({"backlog_bytes": 30}, 3)]
)
def test_a_backlog_is_limited_until_messages_are_finished(
    tenants: Tenants, limits: dict[str, int], count: int
) -> None:
    tenants.limit(PROD, **limits)
    (name,) = limits
    sent = [tenants.send(PROD, "x" * 10) for _ in range(count + 1)]
    assert sent == [""] * count + [name]
    assert tenants.report(PROD).used[name] == limits[name]
    reader = tenants.consume(full_name(PROD, "t"), "g")
    for item in reader.take():
        assert tenants.ack(reader, item) is None
    tenants.pass_ms(RECOUNT_MS)
    assert tenants.send(PROD, "x" * 10) == ""


def test_kept_messages_are_limited_by_disk_bytes(tenants: Tenants) -> None:
    tenants.limit(PROD, disk_bytes=30)
    reader = tenants.consume(full_name(PROD, "t"), "g")
    for _ in range(3):
        assert tenants.send(PROD, "x" * 10) == ""
        assert tenants.ack(reader, reader.one()) is None
    tenants.pass_ms(RECOUNT_MS)
    assert tenants.send(PROD, "x" * 10) == "disk_bytes"


def test_the_quota_caps_retention(tenants: Tenants) -> None:
    """felix-101."""
    topic = tenants.state.topics[full_name(PROD, "t")]
    quotas = tenants.engine.quotas
    assert quotas.retention_ms(topic) == 0
    tenants.limit(PROD, stream_retention=5000)
    assert quotas.retention_ms(topic) == 5000
    tenants.limit(("acme", ""), stream_retention=3000)
    assert quotas.retention_ms(topic) == 3000
    topic.retention_ms = 1000
    assert quotas.retention_ms(topic) == 1000


def test_messages_older_than_the_cap_are_removed() -> None:
    """felix-101, 126."""
    tenants = Tenants(FaultyVfs())
    tenants.limit(PROD, stream_retention=5000)
    reader = tenants.consume(full_name(PROD, "t"), "g")
    tenants.send(PROD)
    assert tenants.ack(reader, reader.one()) is None
    tenants.pass_ms(60_000)
    tenants.send(PROD)
    tenants.pass_ms(120_000)
    partition = tenants.state.topics[full_name(PROD, "t")].partitions[0]
    assert partition.first_offset == 1


def test_events_older_than_the_cap_are_removed_from_a_durable_stream() -> None:
    """felix-101, 126."""
    tenants = Tenants(FaultyVfs())
    tenants.add_durable(PROD)
    log = tenants.state.topics[stream_log_name((*PROD, "d"))]
    tenants.limit(PROD, stream_retention=5000)
    assert tenants.engine.quotas.retention_ms(log) == 5000
    tenants.publish_kept(PROD)
    tenants.pass_ms(60_000)
    tenants.publish_kept(PROD)
    tenants.pass_ms(120_000)
    assert log.partitions[0].first_offset >= 1


def test_the_cap_waits_for_what_a_group_or_a_name_has_not_finished() -> None:
    """felix-101: however old it is. A limit on the backlog bounds it, and once it is finished or
    its group deleted, the cap removes it; whoever asks for it then is told."""
    tenants = Tenants(FaultyVfs())
    tenants.add_durable(PROD)
    topic, log_name = full_name(PROD, "t"), stream_log_name((*PROD, "d"))
    tenants.limit(PROD, stream_retention=5000, backlog_msgs=6)
    reader, named = Reader(topic, "g", "o"), EventReader(log_name, "n", "o")
    engine = tenants.engine
    tenants.must(engine.open_consumer, topic, "g", "o", 1000, 1, reader)
    wanted = SubscribeNamed(path=(*PROD, "d"), name="n", owner="o", prefetch=1)
    tenants.must(engine.streams.consume, wanted, named)
    for _ in range(3):
        assert tenants.send(PROD) == quota_of(tenants.publish_kept(PROD)) == ""
    tenants.pass_ms(600_000)
    found = [tenants.state.topics[name].partitions[0] for name in (topic, log_name)]
    assert [each.first_offset for each in found] == [0, 0]
    assert tenants.send(PROD) == quota_of(tenants.publish_kept(PROD)) == "backlog_msgs"
    assert tenants.ack(reader, reader.items[-1]) is None
    item = named.items[-1]
    command = Settle(log_name, "n", 0, item.offset, "o", item.delivery_id)
    assert tenants.call(engine.ack, command) is None
    tenants.pass_ms(60_000)
    assert [each.first_offset for each in found] == [1, 1], "only what is finished"
    tenants.must(engine.delete_group, topic, "g")
    tenants.must(engine.delete_group, log_name, "n")
    tenants.pass_ms(60_000)
    assert [each.first_offset for each in found] == [3, 3]
    late = msgspec.structs.replace(wanted, start=Start("offset", 1))
    assert isinstance(tenants.call(engine.streams.consume, late, named), OutOfRange)


def test_quotas_survive_a_restart() -> None:
    tenants = Tenants(FaultyVfs())
    tenants.limit(PROD, publish_rate_limit=2, backlog_msgs=3)
    for _ in range(2):
        assert tenants.send(PROD) == ""
    tenants.crash()
    assert [tenants.send(PROD), tenants.send(PROD)] == ["", "backlog_msgs"]
    tenants.limit(PROD)
    assert tenants.send(PROD) == ""
    assert not tenants.engine.quotas.is_active


def test_refusals_are_counted(tenants: Tenants) -> None:
    tenants.limit(PROD, publish_rate_limit=1)
    for _ in range(4):
        tenants.send(PROD)
    assert tenants.report(PROD).refused == {"publish_rate_limit": 3}
    (measured,) = tenants.engine.metrics().quotas
    assert (measured.scope, measured.refused) == (PROD, {"publish_rate_limit": 3})


@pytest.mark.parametrize("seed", range(30))
def test_a_margin_never_admits_more_than_an_exact_count(seed: int) -> None:
    """The cached count compared with the truth, over random histories."""
    dice = random.Random(seed)
    limit, used, now_ms = 100, 0, 0
    margin = UseMargin(limit, lambda: used)
    for _ in range(400):
        now_ms += dice.choice([0, 1, 30, RECOUNT_MS])
        if dice.random() < 0.4:
            used -= dice.randint(0, used)
        number = dice.randint(0, 30)
        if margin.has_room(number, now_ms):
            margin.take(number)
            used += number
            assert used <= limit


def test_a_tenant_at_its_limit_is_not_counted_again_for_each_request() -> None:
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 10

    margin = UseMargin(10, count)
    for now_ms in range(1000):
        assert not margin.has_room(1, now_ms)
    assert counted <= 1000 / RECOUNT_MS + 1
