"""Quotas of batch writes: staged bytes count as disk, and a commit needs room for its rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.core.invariants import check
from penstock.engine.limited_scope import RECOUNT_MS
from penstock.model.errors import ResourceExhausted
from penstock.model.quotas import Quota
from penstock.model.tenancy import CacheConfig, Entry
from penstock.model.writes import PieceReport
from tests.engine.write_harness import WriteBroker, numbered, write_broker

SCOPE = ("default", "default")
CACHE = ("default", "default", "c")


@pytest.fixture
def broker() -> WriteBroker:
    found = write_broker()
    config = CacheConfig(durable=True)
    entry = Entry(kind="cache", tenant_id=SCOPE[0], namespace=SCOPE[1], name="c", cache=config)
    found.must(found.engine.registry.create, entry)
    return found


def limit(broker: WriteBroker, **limits: int) -> None:
    def change(done: Any) -> None:
        broker.engine.registry.change((*SCOPE, ""), done, quota=Quota(**limits))

    broker.must(change)


def used(broker: WriteBroker, name: str) -> int:
    count: int = broker.must(broker.engine.quotas.report, SCOPE).used[name]
    return count


def refusal(outcome: object) -> str:
    assert isinstance(outcome, ResourceExhausted), outcome
    assert outcome.reason == "quota"
    assert outcome.retry_after_ms > 0
    return outcome.limit


def test_staged_bytes_count_as_disk(broker: WriteBroker) -> None:
    staged = broker.stage(numbered(100)).bytes
    assert used(broker, "disk_bytes") == staged
    limit(broker, disk_bytes=2 * staged)
    broker.kill()
    assert used(broker, "disk_bytes") == staged
    assert refusal(broker.stage_in_vain(numbered(500), batch=1)) == "disk_bytes"
    broker.must(broker.engine.writes.abort, "p", 0)
    broker.pass_ms(1000)
    assert used(broker, "disk_bytes") == 0
    broker.stage(numbered(100), batch=1)


def test_pieces_that_are_sent_at_once_do_not_all_pass(broker: WriteBroker) -> None:
    staged = broker.stage(numbered(100)).bytes
    limit(broker, disk_bytes=3 * staged)
    outcomes: list[Any] = []
    for number in range(1, 20):
        broker.start_stage(numbered(100), outcomes.append, piece=number)
    broker.settle()
    while len(outcomes) < 19:
        broker.pass_ms(1)
    stored = [each for each in outcomes if isinstance(each, PieceReport)]
    assert 1 <= len(stored) <= 2
    assert {refusal(each) for each in outcomes if each not in stored} == {"disk_bytes"}
    assert used(broker, "disk_bytes") == staged + sum(each.bytes for each in stored)


def test_a_batch_larger_than_the_rate_is_paid_back_by_the_next(broker: WriteBroker) -> None:
    """felix-98: a commit that is repeated is not charged again."""
    limit(broker, publish_rate_limit=10)
    broker.write_batch(numbered(30))
    assert used(broker, "publish_rate_limit") == 30
    for _ in range(3):
        assert broker.commit_batch(30).status == "already_committed"
    broker.stage(numbered(1), batch=1)
    assert refusal(broker.try_commit(1, batch=1)) == "publish_rate_limit"
    broker.pass_ms(1900)
    assert refusal(broker.try_commit(1, batch=1)) == "publish_rate_limit"
    broker.pass_ms(200)
    broker.commit_batch(1, batch=1)


@pytest.mark.parametrize(
    "limits",
    [{"backlog_msgs": 30}, {"backlog_bytes": 200}, {"idempotency_keys": 30}],
)
def test_a_batch_without_room_is_refused_at_its_commit(
    broker: WriteBroker, limits: dict[str, int]
) -> None:
    (name,) = limits
    values = numbered(20)
    keys = pa.array([f"k{n}" for n in range(40)], pa.string())
    first = pa.table({"value": values, "idempotency_key": keys[:20]})
    second = pa.table({"value": values, "idempotency_key": keys[20:]})
    limit(broker, **limits)
    broker.stage(first)
    broker.commit_batch(20)
    before = used(broker, name)
    assert 0 < before <= limits[name]
    broker.stage(second, batch=1)
    assert refusal(broker.try_commit(20, batch=1)) == name
    assert used(broker, name) == before
    limit(broker)
    broker.commit_batch(20, batch=1)
    assert used(broker, name) == 2 * before or name == "backlog_bytes"


def test_rows_count_from_the_commit_until_they_are_stored(broker: WriteBroker) -> None:
    """A crash in between changes nothing, and nothing counts twice in the end."""
    limit(broker, backlog_msgs=3000)
    broker.stage(numbered(2500))
    broker.ask_commit(2500)
    assert _backlog(broker) == 2500
    broker.stage(numbered(600), producer="q")
    assert refusal(broker.try_commit(600, producer="q")) == "backlog_msgs"
    broker.kill()
    while broker.engine.writes.storing:
        broker.pass_ms(10)
    assert used(broker, "backlog_msgs") == 2500 == len(broker.contents())
    broker.pass_ms(1000)
    broker.write_batch(numbered(500), producer="r")
    check(broker.state)


def _backlog(broker: WriteBroker) -> int:
    """The use now, without waiting for anything."""
    (report,) = broker.engine.quotas.metrics()
    return report.used["backlog_msgs"]


def rows_for_cache(count: int) -> Any:
    return pa.table({"key": [f"k{n}" for n in range(count)], "value": [b"x" * 100] * count})


def test_rows_for_a_cache_need_cache_memory_and_disk(broker: WriteBroker) -> None:
    """felix-100."""
    limit(broker, cache_memory=10_000)
    broker.stage(rows_for_cache(20), cache=CACHE)
    broker.commit_batch(20)
    cache = broker.state.caches[broker.state.registry.caches[CACHE].id]
    assert used(broker, "cache_memory") == cache.bytes > 0
    broker.stage(rows_for_cache(20), cache=CACHE, batch=1)
    assert refusal(broker.try_commit(20, batch=1)) == "cache_memory"
    limit(broker, disk_bytes=cache.bytes + 9000)
    assert refusal(broker.try_commit(20, batch=1)) == "disk_bytes"
    limit(broker)
    broker.commit_batch(20, batch=1)
    broker.pass_ms(1000)
    assert used(broker, "disk_bytes") == cache.bytes


def test_a_cache_with_max_bytes_is_written_anew_within_the_quota(broker: WriteBroker) -> None:
    def bound(done: Any) -> None:
        config = CacheConfig(durable=True, max_bytes=9000)
        broker.engine.registry.change(CACHE, done, cache=config)

    broker.must(bound)
    limit(broker, cache_memory=9000)
    for batch in range(3):
        broker.stage(rows_for_cache(20), cache=CACHE, batch=batch)
        broker.commit_batch(20, batch=batch)
        broker.pass_ms(RECOUNT_MS)
    assert used(broker, "cache_memory") <= 9000


def test_a_commit_that_the_disk_refuses_is_not_charged(broker: WriteBroker) -> None:
    limit(broker, publish_rate_limit=10)
    broker.stage(numbered(30))
    log = broker.log
    has_room, log.has_room = log.has_room, lambda *_, **__: False
    assert not isinstance(broker.try_commit(30), ResourceExhausted)
    log.has_room = has_room
    broker.commit_batch(30)
