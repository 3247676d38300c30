"""Durable streams through both clients and the command line, against a real broker."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncClient, Client, PositionFile
from penstock.client.sync_events import StreamEvent
from penstock.client.sync_handles import StreamHandle
from penstock.model.errors import FailedPrecondition, InvalidArgument, NotYet, Unavailable
from tests.broker_process import BrokerProcess
from tests.cli.conftest import run_penstock

SMALL = {"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)}


class Remembered(set[int]):
    """Handled events in memory."""

    def has(self, offset: int) -> bool:
        return offset in self


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


def test_a_producer_that_starts_again_learns_its_next_number(client: Client) -> None:
    """felix-122: beginning at 0 again would be taken for repeats."""
    client.create_stream("default", "default", "numbered", delivery="exactly_once")
    stream = client.stream("numbered")
    assert stream.next_sequence("till 3/a") == 0
    producer = stream.producer("till 3/a")
    producer.publish("a")
    producer.publish_batch(["b", "c"])
    number = stream.next_sequence("till 3/a")
    assert number == producer.next_sequence == 2
    assert stream.producer("till 3/a", next_sequence=number).publish("d") == 3
    with client.connect() as socket:
        assert socket.stream("numbered").next_sequence("till 3/a") == 3
    client.create_stream("default", "default", "fleeting")
    with pytest.raises(FailedPrecondition):
        client.stream("fleeting").next_sequence("p")


def test_a_producer_gives_up_after_its_time() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.stream("s").producer(retry_s=0.2).publish("a")


def test_repeats_are_dropped_on_receipt(stream: StreamHandle, tmp_path: Path) -> None:
    """felix-124: also by another process, which finds the position in the file."""
    stream.publish_batch(["a", "b", "c"])
    with (
        PositionFile(tmp_path / "position") as handled,
        stream.subscribe(name="n", start="earliest", lease_ms=200, once=handled) as events,
    ):
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
    again.close()
    assert PositionFile(tmp_path / "position").ranges == [(0, 3)]


@pytest.mark.parametrize(
    "options", [{"owner": "o"}, {"lease_ms": 500}, {"prefetch": 1}, {"once": Remembered()}]
)
def test_options_that_need_a_name_are_refused_without_one(
    stream: StreamHandle, options: dict[str, Any]
) -> None:
    [option] = options
    for start in (None, "earliest"):
        with pytest.raises(InvalidArgument, match=f"{option} needs a name"):
            stream.events(start=start, **options)
    with pytest.raises(InvalidArgument, match=f"{option} needs a name"):
        stream.subscribe(**options)
    with stream.client.connect() as socket:
        over_socket = socket.stream(stream.path[2])
        with pytest.raises(InvalidArgument, match=f"{option} needs a name"):
            over_socket.subscribe(**options)


def test_an_empty_name_is_refused_instead_of_a_live_subscription(stream: StreamHandle) -> None:
    for name in ("", " "):
        with pytest.raises(InvalidArgument, match="name must not be empty"):
            stream.subscribe(name=name)


def test_an_event_of_a_subscription_without_a_name_cannot_be_acked(stream: StreamHandle) -> None:
    stream.publish("a")
    with stream.subscribe(start="earliest") as events:
        event = next(events)
        with pytest.raises(InvalidArgument, match="has no name"):
            event.ack()


def test_the_named_subscriptions_are_listed_with_their_progress(stream: StreamHandle) -> None:
    assert not stream.subscriptions()
    stream.publish_batch(["a", "b", "c"])
    with stream.subscribe(name="n", start=1, prefetch=1) as events, stream.subscribe():
        next(events)
        found = stream.subscriptions()
        assert [(each.name, each.subscribers, each.unacked) for each in found.named] == [
            ("n", 1, 1)
        ]
        assert [(each.next_offset, each.messages_behind) for each in found.named] == [(2, 2)]
        assert len(found) == len(list(found)) == 1
    assert (found.first_offset, found.next_offset) == (0, 3)


def test_the_command_line_lists_and_deletes_named_subscriptions(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    """Retention waits for a name that nobody uses any more, so an operator must see and end it."""

    def run(*words: str) -> str:
        ran = run_penstock(*words, "--url", broker.url)
        assert ran.code == 0, ran
        return ran.out

    name = stream.path[2]
    stream.publish_batch(["a", "b", "c"])
    assert run("subscribe", name, "--name", "n", "--start", "earliest", "--max", "1") == "a\n"
    rows = [line.split() for line in run("stream", "subscriptions", name).splitlines()]
    assert rows[0] == ["subscription", "subscribers", "next", "unacked", "behind"]
    assert (rows[-1][0], rows[-1][1], rows[-1][-1]) == ("n", "0", "2")
    found = json.loads(run("stream", "subscriptions", name, "--json"))
    assert found["named"][0]["messages_behind"] == 2
    shown = run("stream", "describe", name)
    assert "keeps offsets 0 to before 3" in shown
    assert "n: 2 behind" in shown
    run("stream", "unsubscribe", name, "n", "--yes")
    assert not stream.subscriptions()
    again = run_penstock("stream", "unsubscribe", name, "n", "--yes", "--url", broker.url)
    assert again.code == 1


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
            with PositionFile(path) as found:
                known = [each for each in range(990, 1210) if found.has(each)]
            assert known == sorted(offsets[: count + 1])
    for offset in range(1000, 1200):
        PositionFile(path).add(offset)
    assert PositionFile(path).ranges == [(1000, 1200)]


@pytest.mark.parametrize("way", ["http", "socket"])
def test_events_that_were_not_taken_go_back_when_a_subscription_is_closed(
    stream: StreamHandle, way: str
) -> None:
    """Nobody waits for a lease of events that no handler has seen, and no attempt is counted."""
    stream.publish_batch([str(number) for number in range(10)])
    with stream.client.connect() as socket:
        handle = stream if way == "http" else socket.stream(stream.path[2])
        seen = []
        for _ in range(3):
            with handle.subscribe(name="n", start="earliest", wait_s=10) as events:
                for _ in range(2):
                    event = next(events)
                    event.ack()
                    seen.append((event.offset, event.attempt))
    assert seen == [(number, 1) for number in range(6)]


def test_an_event_that_is_being_handled_stays_with_its_subscriber(stream: StreamHandle) -> None:
    stream.publish_batch(["a", "b", "c"])
    with stream.subscribe(name="n", start="earliest", lease_ms=60_000) as events:
        taken = next(events)
    with stream.subscribe(name="n", wait_s=0.5) as events:
        assert [(event.offset, event.attempt) for event in events] == [(1, 1), (2, 1)]
    taken.ack()


def test_an_async_subscription_gives_back_what_was_not_taken(broker: BrokerProcess) -> None:
    async def run() -> None:
        async with AsyncClient(broker.url) as client:
            await client.create_stream("default", "default", "leaving", delivery="at_least_once")
            stream = client.stream("leaving")
            await stream.publish_batch(["a", "b", "c"])
            for offset in range(3):
                async with stream.subscribe(name="n", start="earliest", wait_s=10) as events:
                    event = await anext(events)
                    assert (event.offset, event.attempt) == (offset, 1)
                    await event.ack()

    asyncio.run(run())


def test_subscribe_with_max_goes_on_where_it_was(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    stream.publish_batch([str(number) for number in range(6)])
    words = ("subscribe", stream.path[2], "--name", "n", "--start", "earliest", "--max", "2")
    for expected in ("0\n1\n", "2\n3\n", "4\n5\n"):
        ran = run_penstock(*words, "--timeout", "10", "--url", broker.url)
        assert (ran.code, ran.out) == (0, expected)


def test_what_a_person_debugs_with_shows_its_content(stream: StreamHandle) -> None:
    stream.publish("a")
    event = next(stream.subscribe(start="earliest"))
    assert repr(event) == "StreamEvent(offset=0, attempt=0, payload=b'a')"
    producer = stream.producer("till-3", next_sequence=4)
    assert repr(producer) == f"Producer({'/'.join(stream.path)!r}, 'till-3', next_sequence=4)"
    with stream.client.transaction("t") as tx:
        tx.publish(stream.path[2], "x")
        assert repr(tx) == "Transaction('t', 1 operations, open)"
