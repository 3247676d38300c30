"""The journal through the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.client import AsyncClient, Client, Envelope
from penstock.engine.sealing import MIN_REST_MS
from penstock.model.errors import FailedPrecondition, InvalidArgument, OutOfRange
from tests.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker on a disk, where three messages were produced and one was acked, all sealed."""
    small = {"PENSTOCK_SEGMENT_BYTES": "1MiB"}
    broker = BrokerProcess(tmp_path_factory.mktemp("journal"), env=small)
    try:
        with Client(broker.start().url) as client:
            client.create_topic("t")
            for n in range(3):
                client.produce("t", f"{n}", envelope=Envelope(run_id=f"r{n}"))
            with client.consume("t", "g", owner="ada", prefetch=1) as deliveries:
                client.ack(next(deliveries))
            client.journal_offsets(fresh=True)
        yield broker
    finally:
        broker.close()


def test_rows_are_read_to_the_end_and_again(lively: BrokerProcess) -> None:
    with Client(lively.url) as client:
        end = client.journal_offsets(fresh=True)
        rows = list(client.journal(to=end.next, topic="t"))
        kinds = [row["kind"] for row in rows]
        assert kinds[:5] == ["produced", "produced", "produced", "delivered", "acked"]
        assert list(client.journal(to=end.next, topic="t")) == rows
        (acked,) = client.journal(from_=rows[0]["position"], kind="acked", columns=["run_id"])
        assert acked == {"run_id": "r0"}
        assert rows[4]["produced_at"] == rows[0]["timestamp"] == rows[0]["produced_at"]
        assert rows[4]["delivered_at"] == rows[3]["timestamp"] == rows[3]["delivered_at"]
        found = client.journal_offsets(time_ms=0)
        assert found.earliest <= rows[0]["position"] == found.at_time


def test_the_async_client_reads_the_same(lively: BrokerProcess) -> None:
    async def read() -> list[object]:
        async with AsyncClient(lively.url) as client:
            end = await client.journal_offsets(fresh=True)
            async with client.journal(to=end.next, kind="produced") as rows:
                return [row["offset"] async for row in rows]

    assert asyncio.run(read()) == [0, 1, 2]


def test_a_fresh_look_may_take_longer_than_other_calls(lively: BrokerProcess) -> None:
    """The broker makes them wait for at least MIN_REST_MS after the look of the fixture."""
    brief_s = MIN_REST_MS / 1000 / 2

    async def look_with_both_clients(brief: Client) -> list[int]:
        async with AsyncClient(lively.url, timeout_s=brief_s) as aclient:
            ends = await asyncio.gather(
                asyncio.to_thread(brief.journal_offsets, fresh=True),
                aclient.journal_offsets(fresh=True),
            )
        return [end.next for end in ends]

    with Client(lively.url) as patient, Client(lively.url, timeout_s=brief_s) as brief:
        before = patient.journal_offsets().next
        patient.produce("t", "look")
        assert all(before < end for end in asyncio.run(look_with_both_clients(brief)))


def test_refusals_are_raised(lively: BrokerProcess, client: Client) -> None:
    with Client(lively.url) as durable:
        with pytest.raises(OutOfRange):
            durable.journal(from_=0).open()
        with pytest.raises(InvalidArgument, match="exploded"):
            durable.journal(kind="exploded").open()
    with pytest.raises(FailedPrecondition, match="no journal"):
        client.journal_offsets()


def test_the_archived_position_of_the_journal_can_be_set(lively: BrokerProcess) -> None:
    with Client(lively.url) as client:
        end = client.journal_offsets().next
        assert end > 0
        assert client.set_journal_archived(end).next == end
        assert client.journal_offsets().archived == end

    async def say() -> int:
        async with AsyncClient(lively.url) as aclient:
            return (await aclient.set_journal_archived(0)).next

    assert asyncio.run(say()) == end
