"""Section I: deleting and retention, driftq-70."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import SEAL_TIMEOUT_S, BrokerProcess, eventually, settle_body, wait_until
from tests.contract.checks import (
    assert_done,
    assert_error,
    assert_invalid,
    assert_not_found,
)
from tests.contract.conftest import StartBroker


def test_deleting_a_topic_ends_its_streams_and_frees_the_name(start_broker: StartBroker) -> None:
    """driftq-70: for good, a restart included."""
    broker = start_broker()
    topic = broker.create_topic("t", 3)
    other = broker.create_topic("other")
    broker.put(topic, "old", envelope={"idempotency_key": "k"})
    stream = broker.open_consume(topic)
    bystander = broker.open_consume(other)
    item = stream.next()
    assert_done(broker.client.delete("/v1/topics/t"))
    stream.wait_for_end(5)
    assert stream.clean_end
    stream.close()
    assert_not_found(broker.produce(topic, "v"))
    assert_not_found(broker.ack(topic, item))
    assert_not_found(broker.client.get("/v1/topics/t"))
    assert_not_found(broker.client.delete("/v1/topics/t"))
    broker.put(other, "goes on")
    assert bystander.next().value == "goes on"
    bystander.close()
    broker.restart(kill=True)
    assert broker.client.get("/v1/topics").json() == {"topics": ["other"]}
    broker.create_topic(topic, 1)
    broker.put(topic, "new", envelope={"idempotency_key": "k"})
    with broker.consume(topic) as again:
        item = again.next()
        assert (item.value, item.attempts, item.offset) == ("new", 1, 0)
        again.expect_nothing(100)
    broker.restart(kill=True)
    with broker.consume(topic, "audit") as again:
        assert again.next().value == "new"
        again.expect_nothing(100)


def test_deleting_a_group_ends_its_streams_and_forgets_its_progress(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-70"""
    broker.put(topic, "0")
    broker.put(topic, "1")
    stream = broker.open_consume(topic, "doomed")
    kept = broker.open_consume(topic, "kept")
    first, second = stream.take(2)
    assert_done(broker.ack(topic, first, "doomed"))
    assert_done(broker.ack(topic, kept.next(), "kept"))
    assert_done(broker.client.delete(f"/v1/topics/{topic}/groups/doomed"))
    stream.wait_for_end(5)
    stream.close()
    assert_error(broker.ack(topic, second, "doomed"), 409, "FAILED_PRECONDITION")
    assert_not_found(broker.client.delete(f"/v1/topics/{topic}/groups/doomed"))
    with broker.consume(topic, "doomed") as again:
        assert [(i.value, i.attempts) for i in again.take(2)] == [("0", 1), ("1", 1)]
    assert kept.next().value == "1"
    kept.close()


def test_deleting_a_group_frees_what_only_it_held(start_broker: StartBroker) -> None:
    """driftq-70"""
    broker = start_broker("--profile", "contract", memory=True)
    topic = broker.create_topic("t")
    with broker.consume(topic, "fast") as fast, broker.consume(topic, "stuck"):
        broker.put(topic, "0")
        broker.put(topic, "1")
        for item in fast.take(2):
            assert_done(broker.ack(topic, item, "fast"))
        assert broker.produce(topic, "2").status_code == 429
        assert_done(broker.client.delete("/v1/topics/t/groups/stuck"))
        broker.put(topic, "2")
        assert fast.next().value == "2"


def test_deleting_what_is_not_there_is_404(broker: BrokerProcess, topic: str) -> None:
    """driftq-70"""
    assert_not_found(broker.client.delete("/v1/topics/nowhere"))
    assert_not_found(broker.client.delete(f"/v1/topics/{topic}/groups/nobody"))
    assert_not_found(broker.client.delete("/v1/topics/nowhere/groups/nobody"))


def used_bytes(directory: Path) -> int:
    """What the directory takes on disk; preallocated or sparse, blocks are blocks. A file that the
    broker removes while this looks takes nothing."""
    blocks = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            blocks += path.stat().st_blocks
    return blocks * 512


def fill(broker: BrokerProcess, topic: str, count: int, size: int) -> None:
    for start in range(0, count, 20):
        batch = [
            {"topic": topic, "value": f"{n}:".ljust(size, "x")} for n in range(start, start + 20)
        ]
        reply = broker.client.post("/v1/produce/batch", json=batch)
        assert {r.get("status") for r in reply.json()["results"]} == {"produced"}, reply.text


def test_a_deleted_topic_gives_its_disk_back(start_broker: StartBroker) -> None:
    """driftq-70: 16 MB of a topic, in segments that can go one by one."""
    broker = start_broker(env={"PENSTOCK_SEGMENT_BYTES": str(2**20)})
    assert broker.data_dir is not None
    directory = broker.data_dir
    topic = broker.create_topic("t")
    empty = used_bytes(directory)
    fill(broker, topic, 1000, 16_000)
    assert used_bytes(directory) > empty + 8 * 2**20
    assert_done(broker.client.delete("/v1/topics/t"))
    eventually(lambda: used_bytes(directory), lambda used: used < empty + 6 * 2**20, SEAL_TIMEOUT_S)


def acked_backlog(broker: BrokerProcess, topic: str, count: int, size: int) -> None:
    with broker.consume(topic) as stream:
        fill(broker, topic, count, size)
        bodies = [settle_body(topic, item, "g", "o") for item in stream.take(count)]
    reply = broker.client.post("/v1/ack/batch", json=bodies)
    assert {r["status"] for r in reply.json()["results"]} == {"acked"}


def first_offset(broker: BrokerProcess, topic: str) -> int:
    """Of the oldest message that is retained."""
    described = broker.client.get(f"/v1/topics/{topic}").json()
    return int(described["partitions"][0]["first_offset"])


def retain(broker: BrokerProcess, topic: str, **limits: int) -> None:
    reply = broker.client.patch(f"/v1/topics/{topic}", json=limits)
    assert reply.status_code in (200, 204), reply.text
    described = broker.client.get(f"/v1/topics/{topic}").json()
    assert limits.items() <= described.items()


@pytest.mark.parametrize("name", ["retention_ms", "retention_bytes"])
@pytest.mark.parametrize("number", [10**20, 2**63, 2**53, -1])
def test_a_retention_no_number_in_the_log_can_hold_is_400(
    broker: BrokerProcess, topic: str, name: str, number: int
) -> None:
    """driftq-70, driftq-65"""
    path = f"/v1/topics/{topic}"
    assert_invalid(broker.client.patch(path, json={name: number}))
    assert_invalid(broker.client.patch(f"{path}?{name}={number}"))
    assert broker.client.get(path).json()[name] == 0
    retain(broker, topic, **{name: 2**53 - 1})


TINY_SEGMENTS = {"PENSTOCK_SEGMENT_BYTES": str(2**18)}


def test_retention_by_bytes_removes_what_every_group_has_finished(
    start_broker: StartBroker,
) -> None:
    """driftq-70: about 100 kB of finished messages stay; a new group begins with those."""
    broker = start_broker("--max-in-flight", "1000", env=TINY_SEGMENTS)
    topic = broker.create_topic("t")
    acked_backlog(broker, topic, 600, 1000)
    assert first_offset(broker, topic) == 0
    retain(broker, topic, retention_bytes=100_000)
    kept = eventually(
        lambda: first_offset(broker, topic), lambda offset: offset >= 250, SEAL_TIMEOUT_S
    )
    assert kept <= 500, "less is kept than the limit allows"
    broker.restart(kill=True)
    kept = first_offset(broker, topic)
    with broker.consume(topic, "new") as stream:
        assert [i.offset for i in stream.take(600 - kept)] == list(range(kept, 600))
    with broker.consume(topic) as stream:
        stream.expect_nothing(100)


def test_retention_keeps_what_a_group_has_not_finished(start_broker: StartBroker) -> None:
    """driftq-70: another topic, finished by all, shows that retention has been at work."""
    broker = start_broker("--max-in-flight", "1000", env=TINY_SEGMENTS)
    topic, other = broker.create_topic("t"), broker.create_topic("other")
    with broker.consume(topic, "behind") as behind:
        for name in (topic, other):
            acked_backlog(broker, name, 300, 1000)
            retain(broker, name, retention_bytes=1, retention_ms=1)
        eventually(lambda: first_offset(broker, other), lambda offset: offset > 0, SEAL_TIMEOUT_S)
        assert first_offset(broker, topic) == 0
        items = behind.take(300)
        assert [item.offset for item in items] == list(range(300))
        for item in items:
            assert_done(broker.nack(topic, item, "behind", delay_ms=0))
        again = behind.take(300)
        assert [item.value for item in again] == [item.value for item in items]
        for item in again:
            assert_done(broker.ack(topic, item, "behind"))
    eventually(lambda: first_offset(broker, topic), lambda offset: offset > 0, SEAL_TIMEOUT_S)


def test_a_duplicate_ack_of_what_retention_removed_is_still_204(start_broker: StartBroker) -> None:
    """driftq-29, driftq-70: done stays done when the message itself is gone."""
    broker = start_broker("--max-in-flight", "1000", env=TINY_SEGMENTS)
    acks: list[dict[str, Any]] = []
    for partitions in (1, 2):
        topic = broker.create_topic(f"t{partitions}", partitions)
        retain(broker, topic, retention_ms=1)
        acked_backlog(broker, topic, 300, 1000)
        eventually(
            partial(first_offset, broker, topic), lambda offset: offset > 100, SEAL_TIMEOUT_S
        )
        acks.append({"topic": topic, "group": "g", "owner": "o", "partition": 0, "offset": 7})
    for body in acks:
        assert_done(broker.client.post("/v1/ack", json=body))
    broker.restart(kill=True)
    for body in acks:
        assert_done(broker.client.post("/v1/ack", json=body))


def test_retention_by_age_removes_what_is_old_and_only_that(start_broker: StartBroker) -> None:
    """driftq-70"""
    broker = start_broker("--max-in-flight", "1000", env=TINY_SEGMENTS)
    topic = broker.create_topic("t")
    retain(broker, topic, retention_ms=3000)
    old = time.monotonic()
    acked_backlog(broker, topic, 100, 1000)
    wait_until(old + 2)
    young = time.monotonic()
    acked_backlog(broker, topic, 100, 1000)
    seen: list[tuple[int, float]] = []

    def look() -> int:
        offset = first_offset(broker, topic)
        seen.append((offset, time.monotonic()))
        return offset

    eventually(look, lambda offset: offset >= 200, SEAL_TIMEOUT_S)
    assert all(offset == 0 for offset, moment in seen if moment < old + 3)
    assert all(offset <= 100 for offset, moment in seen if moment < young + 3)
    assert {offset for offset, _ in seen} & set(range(1, 101)), "old and young went together"


def test_with_after_archive_nothing_goes_before_the_group_archive_has_finished_it(
    start_broker: StartBroker,
) -> None:
    """driftq-70: another topic, finished by all, shows that retention has been at work."""
    broker = start_broker("--max-in-flight", "1000", env=TINY_SEGMENTS)
    reply = broker.client.post("/v1/topics", json={"name": "t", "after_archive": True})
    assert reply.status_code == 201
    other = broker.create_topic("other")
    for name in ("t", other):
        acked_backlog(broker, name, 300, 1000)
        retain(broker, name, retention_ms=1)
    assert broker.client.get("/v1/topics/t").json()["after_archive"] is True
    eventually(lambda: first_offset(broker, other), lambda offset: offset > 200, SEAL_TIMEOUT_S)
    assert first_offset(broker, "t") == 0
    broker.restart(kill=True)
    assert first_offset(broker, "t") == 0
    reached = {"partitions": [{"partition": 0, "next": 300}]}
    reply = broker.client.post("/v1/topics/t/groups/archive/progress", json=reached)
    assert reply.status_code == 200, reply.text
    eventually(lambda: first_offset(broker, "t"), lambda offset: offset == 300, SEAL_TIMEOUT_S)


def test_after_archive_is_set_in_body_or_query_and_an_absent_one_stays(
    broker: BrokerProcess, topic: str
) -> None:
    """driftq-70"""
    path = f"/v1/topics/{topic}"

    def shown() -> tuple[int, bool]:
        described = broker.client.get(path).json()
        return described["retention_ms"], described["after_archive"]

    assert shown() == (0, False)
    assert_done(broker.client.patch(path, json={"after_archive": True}))
    assert_done(broker.client.patch(f"{path}?retention_ms=5"))
    assert shown() == (5, True)
    assert_done(broker.client.patch(f"{path}?after_archive=false"))
    assert shown() == (5, False)
    assert_done(broker.client.patch(f"{path}?after_archive=true"))
    assert shown() == (5, True)
    assert_done(broker.client.patch(f"{path}?after_archive="))
    assert shown() == (5, True)
    assert_invalid(broker.client.patch(f"{path}?after_archive=perhaps"))
    assert_error(
        broker.client.post("/v1/topics", json={"name": topic, "after_archive": False}),
        409,
        "FAILED_PRECONDITION",
    )
    created = broker.client.post(f"/v1/topics?name={topic}-kept&after_archive=true")
    assert created.status_code == 201
    assert broker.client.get(f"{path}-kept").json()["after_archive"] is True


@pytest.mark.parametrize(
    "body",
    [
        {"retention_ms": -1},
        {"retention_bytes": 1.5},
        {"retention_ms": "1d"},
        {"extra": 1},
        {"after_archive": 1},
    ],
)
def test_a_wrong_retention_is_400(broker: BrokerProcess, topic: str, body: dict[str, Any]) -> None:
    """driftq-70"""
    assert_invalid(broker.client.patch(f"/v1/topics/{topic}", json=body))


def test_retention_of_an_unknown_topic_is_404(broker: BrokerProcess) -> None:
    """driftq-70"""
    assert_not_found(broker.client.patch("/v1/topics/nowhere", json={"retention_ms": 1}))
