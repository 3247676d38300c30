"""Ranges of durable streams and snapshots of caches, through both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from penstock.client import AsyncClient, CachedEntry, Client
from penstock.model.errors import FailedPrecondition, NotFound, NotYet
from penstock.model.ranges import StreamOffsets
from penstock.model.splits import Split, Splits
from tests.broker_process import BrokerProcess

ODD = [b"", b"\xff\x00", b"plain", b"4", b"5"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("data"))
    try:
        yield process.start()
    finally:
        process.close()


@pytest.fixture
def stream(client: Client, request: pytest.FixtureRequest) -> str:
    """A durable stream with five events."""
    name: str = request.node.name
    client.create_stream("default", "default", name, delivery="at_least_once")
    assert client.stream(name).publish_batch(ODD) == 0
    return name


def test_events_are_read_by_their_offsets(client: Client, stream: str) -> None:
    orders = client.stream(stream)
    with orders.read_range() as events:
        found = list(events)
    assert [(each.offset, each.payload) for each in found] == list(enumerate(ODD))
    assert abs(found[0].timestamp - datetime.now(UTC)) < timedelta(hours=1)
    assert [each.offset for each in orders.read_range(1, 3)] == [1, 2]
    late_ms = int(found[-1].timestamp.timestamp() * 1000) + 1000
    assert list(orders.read_range(from_ms=late_ms)) == []
    with pytest.raises(NotYet):
        orders.read_range(end=6).open()


def test_offsets_splits_and_progress(client: Client, stream: str) -> None:
    orders = client.stream(stream)
    found = orders.offsets()
    assert found == StreamOffsets(found.stream_id, 0, 5)
    assert orders.offsets(time_ms=0).at_time == 0
    assert orders.splits(rows=3) == Splits([Split(0, 3, 3), Split(3, 5, 2)], 5)
    assert orders.set_progress("archive", 4) == 4
    assert orders.set_progress("archive", 2) == 4
    with orders.subscribe(name="archive", wait_s=1) as events:
        assert next(events).offset == 4


def test_a_stream_that_keeps_nothing_has_no_ranges(client: Client) -> None:
    with pytest.raises(FailedPrecondition):
        client.stream("default").read_range().open()
    with pytest.raises(FailedPrecondition):
        client.stream("default").offsets()
    with pytest.raises(NotFound):
        client.stream("nowhere").splits()


def test_a_snapshot_has_every_entry(client: Client) -> None:
    client.create_cache("default", "default", "snapshots")
    cache = client.cache("snapshots")
    assert list(cache.entries()) == []
    version = cache.put("a/b", b"\xff\x00")
    later = cache.put("c", "text", ttl_ms=60_000)
    with cache.entries() as found:
        entries = {each.key: each for each in found}
    assert entries["a/b"] == CachedEntry("a/b", b"\xff\x00", version)
    assert (entries["c"].value, entries["c"].version) == (b"text", later)
    assert entries["c"].expires_at is not None
    assert timedelta() < entries["c"].expires_at - datetime.now(UTC) < timedelta(minutes=2)
    with pytest.raises(NotFound):
        client.cache("nowhere").entries().open()


def test_the_async_client_does_the_same(broker: BrokerProcess, client: Client, stream: str) -> None:
    async def read() -> None:
        async with AsyncClient(broker.url) as other:
            async with other.stream(stream).read_range(3) as events:
                assert [each.payload async for each in events] == ODD[3:]
            assert (await other.stream(stream).offsets()).next == 5
            client.cache("default").put("of async", "1")
            async with other.cache("default").entries() as found:
                assert "of async" in [each.key async for each in found]

    asyncio.run(read())
