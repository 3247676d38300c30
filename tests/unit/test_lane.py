"""One connection with no socket under it: what only its inside can show in a short time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.produce import Produce
from penstock.model.errors import NotFound
from tests.unit.lane_connection import Connection, on_a_connection

CONSUME = b"GET /v1/consume?topic=t&group=g&owner=o HTTP/1.1\r\nHost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["later", "in the same write"])
def test_no_timer_of_uvicorn_ends_a_stream_on_a_connection_that_used_metrics(
    is_pipelined: bool,
) -> None:
    """driftq-18, driftq-65: a stream is open until one side ends it."""

    async def test(connection: Connection) -> None:
        lane = connection.lane
        lane.data_received(METRICS + (CONSUME if is_pipelined else b""))
        await connection.until_written(b"penstock_")
        if not is_pipelined:
            lane.data_received(CONSUME)
        await connection.until_written(b"x-ndjson")
        assert lane.stream is not None
        assert lane.timeout_keep_alive_task is None

    on_a_connection(test)


@pytest.mark.parametrize("behind", [b"/v1/healthz", b"/metrics"])
def test_what_waits_behind_a_consume_that_is_refused_later_is_answered(
    monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """driftq-65: the refusal waits for what others have written to the log."""

    async def test(connection: Connection) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(
            connection.engine, "open_consumer", lambda *args: asked.append(args[-1])
        )
        connection.lane.data_received(CONSUME + METRICS.replace(b"/metrics", behind))
        assert len(asked) == 1
        asked[0](NotFound("no such topic"))
        await connection.until_written(b"HTTP/1.1 404")
        await connection.until_written(b"HTTP/1.1 200")

    on_a_connection(test)


@pytest.mark.parametrize("is_full_before", [True, False])
def test_a_stream_on_a_full_connection_is_given_nothing_until_there_is_room(
    is_full_before: bool,
) -> None:
    """driftq-24: answers nobody reads came before it."""

    async def test(connection: Connection) -> None:
        lane = connection.lane
        if is_full_before:
            lane.pause_writing()
            lane.data_received(CONSUME)
        else:
            lane.data_received(CONSUME)
            lane.pause_writing()
        for n in range(3):
            stored = asyncio.get_running_loop().create_future()
            connection.engine.produce(Produce("t", "", f"value {n}"), stored.set_result)
            await stored
        for _ in range(20):
            await asyncio.sleep(0)
        assert b"value" not in connection.transport.written
        lane.resume_writing()
        await connection.until_written(b"value 2")

    on_a_connection(test)


def test_a_silent_connection_that_used_metrics_is_ended_by_the_sweep() -> None:
    """driftq-69: no other timer is left to do it."""

    async def test(connection: Connection) -> None:
        lane = connection.lane
        lane.data_received(METRICS)
        await connection.until_written(b"penstock_")
        async with asyncio.timeout(5):
            while not lane.is_idle():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        connection.hub.tick([lane])
        assert not connection.transport.closed
        lane.touched -= 61
        connection.hub.tick([lane])
        assert connection.transport.closed

    on_a_connection(test)


@pytest.mark.parametrize("is_ended_by_broker", [True, False])
def test_bodies_that_waited_behind_a_stream_are_not_counted_after_its_end(
    is_ended_by_broker: bool,
) -> None:
    """driftq-69: else large requests would be refused one day with nothing held."""

    async def test(connection: Connection) -> None:
        lane = connection.lane
        lane.data_received(CONSUME)
        await connection.until_written(b"x-ndjson")
        head = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        lane.data_received(head + b"x" * 1000 + head + b"x" * 500)
        assert connection.hub.body_bytes == 1500
        if is_ended_by_broker:
            connection.engine.end_streams("because")
            assert connection.hub.body_bytes == 500  # the other is being answered
        lane.connection_lost(None)
        assert connection.hub.body_bytes == 0

    on_a_connection(test)
