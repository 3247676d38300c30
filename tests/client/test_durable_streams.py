"""Durable streams through both clients and the command line, against a real broker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.client import AsyncClient, Client, PositionFile
from penstock.client.sync_events import StreamEvent
from penstock.client.sync_handles import StreamHandle
from penstock.model.errors import FailedPrecondition, NotYet, Unavailable
from tests.broker_process import BrokerProcess
from tests.cli.conftest import run_penstock

SMALL = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("data"), env=SMALL)
    try:
        yield process.start()
    finally:
        process.close()


@pytest.fixture
def stream(client: Client, request: pytest.FixtureRequest) -> StreamHandle:
    name: str = request.node.name
    client.create_stream("default", "default", name, delivery="at_least_once")
    return client.stream(name)


def payloads(events: Iterator[StreamEvent]) -> list[bytes]:
    return [event.payload for event in events]


def test_events_come_until_they_are_acked(stream: StreamHandle) -> None:
    """felix-110, 119, 121"""
    assert [stream.publish("a"), stream.publish_batch(["b", "c"])] == [0, 1]
    with stream.subscribe(name="n", start="earliest", lease_ms=60_000) as events:
        a, b, c = next(events), next(events), next(events)
        assert [a.payload, b.payload, c.payload] == [b"a", b"b", b"c"]
        a.ack()
        b.extend(90_000)
        b.nack("no", delay_ms=0)
        again = next(events)
        assert (again.offset, again.attempt, again.last_error) == (1, 2, "no")
        with pytest.raises(FailedPrecondition):
            b.nack()
        again.ack()
        c.ack()
    with stream.subscribe(name="n", wait_s=0.5) as events:
        assert payloads(events) == []
    stream.delete_subscription("n")


def test_a_start_is_an_offset_or_a_time(stream: StreamHandle) -> None:
    stream.publish_batch(["a", "b"])
    assert payloads(stream.subscribe(start=1, wait_s=0.5)) == [b"b"]
    assert payloads(stream.subscribe(start="latest", wait_s=0.5)) == []
    before = datetime.now(UTC) - timedelta(hours=1)
    assert payloads(stream.subscribe(start=before, wait_s=0.5)) == [b"a", b"b"]
    assert payloads(stream.events(wait_s=0.5)) == [b"a", b"b"]
    with pytest.raises(NotYet), stream.subscribe(start=3):
        pass


def test_a_producer_stores_each_event_once(client: Client) -> None:
    """felix-122: a repeat of the same number gets the same answer."""
    client.create_stream("default", "default", "once", delivery="exactly_once")
    stream = client.stream("once")
    producer = stream.producer()
    assert [producer.publish("a"), producer.publish_batch(["b", "c"])] == [0, 1]
    repeated = stream.producer(producer.producer_id, next_sequence=1)
    assert repeated.publish_batch(["b", "c"]) == 1
    assert repeated.publish("d") == 3
    assert payloads(stream.subscribe(start="earliest", wait_s=0.5)) == [b"a", b"b", b"c", b"d"]
    with pytest.raises(FailedPrecondition, match="3 is expected"):
        stream.producer(producer.producer_id, next_sequence=9).publish("x")


def test_a_producer_gives_up_after_its_time() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.stream("s").producer(retry_s=0.2).publish("a")


def test_repeats_are_dropped_on_receipt(stream: StreamHandle, tmp_path: Path) -> None:
    """felix-124: also by another process, which finds the position in the file."""
    stream.publish_batch(["a", "b", "c"])
    handled = PositionFile(tmp_path / "position")
    with stream.subscribe(name="n", start="earliest", lease_ms=200, once=handled) as events:
        for event in [next(events) for _ in range(3)]:
            if event.payload != b"b":
                handled.add(event.offset)  # its effect is there; the ack gets lost
    again = PositionFile(tmp_path / "position")
    assert [again.has(offset) for offset in range(3)] == [True, False, True]
    with stream.subscribe(name="n", once=again, wait_s=1) as events:
        seen = []
        for event in events:
            seen.append(event.payload)
            event.ack()
    assert seen == [b"b"]
    assert PositionFile(tmp_path / "position").ranges == [(0, 3)]


def test_the_async_client_has_the_same(broker: BrokerProcess) -> None:
    async def run() -> None:
        async with AsyncClient(broker.url) as client:
            await client.create_stream("default", "default", "async", delivery="exactly_once")
            stream = client.stream("async")
            producer = stream.producer("p")
            assert await producer.publish("a") == 0
            async with stream.subscribe(name="n", start="earliest", wait_s=0.5) as events:
                async for event in events:
                    assert event.payload == b"a"
                    await event.ack()

    asyncio.run(run())


def test_the_command_line_has_the_same(broker: BrokerProcess) -> None:
    def run(*words: str) -> str:
        ran = run_penstock(*words, "--url", broker.url)
        assert ran.code == 0, ran
        return ran.out

    run("stream", "create", "cli", "--delivery", "at_least_once", "--retention", "7d")
    run("publish", "cli", "one", "two")
    assert run("subscribe", "cli", "--start", "1", "--max", "1") == "two\n"
    shown = run("subscribe", "cli", "--name", "n", "--start", "earliest", "--max", "2")
    assert shown == "one\ntwo\n"
    assert run("subscribe", "cli", "--name", "n", "--timeout", "0.5") == ""
    assert "at_least_once" in run("stream", "describe", "cli")
    numbers = ("--producer-id", "p", "--sequence", "0")
    run("publish", "cli", "three", "four", *numbers)
    run("publish", "cli", "three", "four", *numbers)
    shown = run("subscribe", "cli", "--start", "2", "--timeout", "0.5")
    assert shown == "three\nfour\n"


def test_a_position_file_remembers_exactly_what_was_handled(tmp_path: Path) -> None:
    """felix-124: whatever the order, and from whatever offset it begins."""
    rng = random.Random(5)
    offsets = rng.sample(range(1000, 1200), 120)
    path = tmp_path / "position"
    for count, offset in enumerate(offsets):
        PositionFile(path).add(offset)
        if count % 40 == 0:
            found = PositionFile(path)
            known = [each for each in range(990, 1210) if found.has(each)]
            assert known == sorted(offsets[: count + 1])
    for offset in range(1000, 1200):
        PositionFile(path).add(offset)
    assert PositionFile(path).ranges == [(1000, 1200)]
