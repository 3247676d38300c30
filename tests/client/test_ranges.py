"""Offsets, splits, rows and progress through both clients."""

from __future__ import annotations

import asyncio

import pytest

from penstock.client import AsyncClient, Client, Envelope, NewMessage, ranges
from penstock.model.errors import InvalidArgument, NotFound, NotYet, PenstockError, Unavailable
from penstock.model.progress import Reached
from penstock.model.ranges import OffsetReport
from penstock.model.splits import Split, Splits
from tests.broker_process import BrokerProcess


@pytest.fixture
def filled(client: Client, request: pytest.FixtureRequest) -> str:
    """A topic with ten messages in two partitions."""
    topic: str = request.node.name
    client.create_topic(topic, 2)
    outcomes = client.produce_batch(
        NewMessage(topic, f"value {n}", envelope=Envelope(partition_override=n % 2, run_id=f"r{n}"))
        for n in range(10)
    )
    assert not [each for each in outcomes if isinstance(each, PenstockError)]
    return topic


def test_offsets_say_where_partitions_begin_and_end(client: Client, filled: str) -> None:
    assert client.offsets(filled) == [OffsetReport(0, 0, 9), OffsetReport(1, 0, 10)]
    assert [each.at_time for each in client.offsets(filled, time_ms=0)] == [0, 1]
    with pytest.raises(NotFound):
        client.offsets("nobody")


def test_a_range_is_split_and_its_splits_are_read(client: Client, filled: str) -> None:
    found = client.splits(filled, 1, start=2, rows=2)
    assert found == Splits([Split(2, 7, 2), Split(7, 10, 2)], 10)
    assert client.splits(filled, 1, max_rows=1) == Splits([Split(0, 3, 1)], 3)
    for each in found.splits:
        assert len(list(client.read_range(filled, 1, each.start, each.end))) == each.rows
    with pytest.raises(InvalidArgument):
        client.splits(filled, 1, rows=0)


def test_rows_come_with_the_columns_that_are_asked_for(client: Client, filled: str) -> None:
    with client.read_range(filled, 0, columns=["offset", "value"]) as rows:
        assert list(rows) == [{"offset": n, "value": f"value {n}"} for n in range(0, 10, 2)]
    (row,) = client.read_range(filled, 0, 0, 9, run_id="r4")
    assert (row["offset"], row["run_id"]) == (4, "r4")
    assert row["timestamp"].endswith("Z")
    assert list(client.read_range(filled, 0, 3, 3)) == []


def test_rows_that_cannot_be_read_are_refused_when_they_are_opened(
    client: Client, filled: str
) -> None:
    with pytest.raises(NotYet):
        client.read_range(filled, 0, end=99).open()
    with pytest.raises(InvalidArgument, match="columns must be a list"):
        client.read_range(filled, 0, columns="offset")


def test_rows_that_break_off_are_no_range() -> None:
    broker = BrokerProcess(None)
    try:
        with Client(broker.start().url) as client:
            client.create_topic("t")
            client.produce_batch(NewMessage("t", "x" * 100_000) for _ in range(300))
            rows = client.read_range("t", 0)
            assert next(rows)["offset"] == 0
            broker.kill()
            with pytest.raises(Unavailable):
                list(rows)
    finally:
        broker.close()


def test_progress_goes_forward_only(client: Client, filled: str) -> None:
    assert client.set_progress(filled, "query", {0: 4, 1: 10}) == {0: 4, 1: 10}
    assert client.set_progress(filled, "query", {0: 2}) == {0: 4}
    (group,) = client.describe_topic(filled).groups
    assert [each.lag for each in group.partitions] == [3, 0]
    with pytest.raises(NotYet):
        client.set_progress(filled, "query", {0: 11})


def test_asyncio_has_the_same(broker: BrokerProcess, filled: str) -> None:
    async def run() -> None:
        async with AsyncClient(broker.url) as client:
            assert (await client.offsets(filled))[1].next == 10
            page = await client.all_offsets()
            assert filled in [each.topic for each in page.topics]
            assert page.after is None
            assert (await client.splits(filled, 0)).next == 9
            async with client.read_range(filled, 0, 2, 7, columns=["offset"]) as rows:
                assert [row["offset"] async for row in rows] == [2, 4, 6]
            assert await client.set_progress(filled, "query", {1: 3}) == {1: 3}

    asyncio.run(run())


def test_requests_for_ranges_have_only_the_given_parameters() -> None:
    assert ranges.offsets("a/b").path == "/v1/topics/a%2Fb/offsets"
    assert ranges.all_offsets().path == "/v1/offsets"
    assert ranges.all_offsets("a/b").path == "/v1/offsets?after=a%2Fb"
    assert ranges.splits("t", 3).path == "/v1/topics/t/partitions/3/splits"
    assert ranges.splits("t", 3, start=0, rows=5).path.endswith("splits?start=0&rows=5")
    assert (
        ranges.set_progress("t", "g", {1: 2}).body == b'{"partitions":[{"partition":1,"next":2}]}'
    )
    answer = b'{"partitions":[{"partition":1,"next":2,"more":3}]}'
    assert ranges.set_progress("t", "g", {1: 2}).answer(200, answer) == {1: 2}
    assert Reached(1, 2) == Reached(partition=1, next=2)
