"""One connection with no socket under it: what only its inside can show in a short time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from penstock.api.messages import Produce
from penstock.engine import ledger
from penstock.model.errors import NotFound
from penstock.server.http.requests import Request
from penstock.server.http.response_order import Reply
from tests.unit.memory_connection import MemoryConnection, on_a_connection

CONSUME = b"GET /v1/consume?topic=t&group=g&owner=o HTTP/1.1\r\nHost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["later", "in the same write"])
def test_no_timer_ends_a_stream_on_a_connection_that_used_metrics(is_pipelined: bool) -> None:
    """driftq-18, driftq-65: a stream is open until one side ends it."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(METRICS + (CONSUME if is_pipelined else b""))
        await connection.until_written(b"penstock_")
        if not is_pipelined:
            protocol.data_received(CONSUME)
        await connection.until_written(b"x-ndjson")
        protocol.touched -= 61
        connection.dispatch.tick([protocol])
        assert protocol.stream is not None
        assert not connection.transport.closed

    on_a_connection(test)


@pytest.mark.parametrize("behind", [b"/v1/healthz", b"/metrics"])
def test_what_waits_behind_a_consume_that_is_refused_later_is_answered(
    monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """driftq-65: the refusal waits for what others have written to the log."""

    async def test(connection: MemoryConnection) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(
            connection.engine, "open_consumer", lambda *args: asked.append(args[-1])
        )
        connection.protocol.data_received(CONSUME + METRICS.replace(b"/metrics", behind))
        assert len(asked) == 1
        asked[0](NotFound("no such topic"))
        await connection.until_written(b"HTTP/1.1 404")
        await connection.until_written(b"HTTP/1.1 200")

    on_a_connection(test)


@pytest.mark.parametrize("end", ["eof_received", "close_with_stream", "finish"])
def test_nothing_is_delivered_to_a_connection_that_is_closing(end: str) -> None:
    """driftq-24: the transport would drop it, and it would count as delivered. A worker that stops
    closes its side like this, and must leave no lease and no attempt behind."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(CONSUME)
        await connection.until_written(b"x-ndjson")
        getattr(protocol, end)()
        stored = asyncio.get_running_loop().create_future()
        connection.engine.produce(Produce("t", "k", "v"), stored.set_result)
        await stored
        await connection.rest()
        assert b'"value":"v"' not in connection.transport.written
        protocol.connection_lost(None)
        connection.connect()
        connection.protocol.data_received(CONSUME)
        await connection.until_written(b'"attempts":1,"key":"k","value":"v"')

    on_a_connection(test)


@pytest.mark.parametrize("is_full_before", [True, False])
def test_a_stream_on_a_full_connection_is_given_nothing_until_there_is_room(
    is_full_before: bool,
) -> None:
    """driftq-24: answers nobody reads came before it."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        if is_full_before:
            protocol.pause_writing()
            protocol.data_received(CONSUME)
        else:
            protocol.data_received(CONSUME)
            protocol.pause_writing()
        for n in range(3):
            stored = asyncio.get_running_loop().create_future()
            connection.engine.produce(Produce("t", "", f"value {n}"), stored.set_result)
            await stored
        for _ in range(20):
            await asyncio.sleep(0)
        assert b"value" not in connection.transport.written
        protocol.resume_writing()
        await connection.until_written(b"value 2")

    on_a_connection(test)


def test_a_silent_connection_that_used_metrics_is_ended_by_the_sweep() -> None:
    """driftq-69: no other timer is left to do it."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(METRICS)
        await connection.until_written(b"penstock_")
        async with asyncio.timeout(5):
            while not protocol.is_idle():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        connection.dispatch.tick([protocol])
        assert not connection.transport.closed
        protocol.touched -= 61
        connection.dispatch.tick([protocol])
        assert connection.transport.closed

    on_a_connection(test)


@pytest.mark.parametrize("is_ended_by_broker", [True, False])
def test_bodies_that_waited_behind_a_stream_are_not_counted_after_its_end(
    is_ended_by_broker: bool,
) -> None:
    """driftq-69: else large requests would be refused one day with nothing held."""

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(CONSUME)
        await connection.until_written(b"x-ndjson")
        head = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        protocol.data_received(head + b"x" * 1000 + head + b"x" * 500)
        assert connection.dispatch.body_bytes == 1500
        if is_ended_by_broker:
            connection.engine.end_streams("because")
            assert connection.dispatch.body_bytes == 500  # the other is being answered
        protocol.connection_lost(None)
        assert connection.dispatch.body_bytes == 0

    on_a_connection(test)


@pytest.mark.parametrize("refused", [b"OPTIONS * HTTP/2.0\r\n\r\n", b"GET /v1/x HTTP/1.1\r\n\r\n"])
def test_requests_between_metrics_and_a_refusal_are_all_handled_in_order(refused: bytes) -> None:
    """driftq-65: the refusal behind them waits for their answers."""
    names = [b"/v1/a", b"/v1/b", b"/v1/c"]
    between = b"".join(METRICS.replace(b"/metrics", name) for name in names)

    async def test(connection: MemoryConnection) -> None:
        protocol, handled = connection.protocol, []
        handle = connection.dispatch.handle

        def noting(request: Request, reply: Reply) -> None:
            handled.append(request.path)
            handle(request, reply)

        connection.dispatch.handle = noting  # type: ignore[method-assign]
        protocol.data_received(METRICS + between + refused)
        await connection.until_written(b"HTTP/1.1 400")
        statuses = re.findall(rb"HTTP/1.1 ([0-9]+)", connection.transport.written)
        assert statuses == [b"200", b"404", b"404", b"404", b"400"]
        assert handled == [b"/metrics", *names]

    on_a_connection(test)


def test_after_a_broken_invariant_every_command_is_503_and_the_broker_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """driftq-50: the one that met it, those that wait and those that come later."""
    body = b'{"topic":"t","value":"v"}'
    line = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    produce = line % len(body) + body
    ready = METRICS.replace(b"/metrics", b"/v1/readyz")
    topics = METRICS.replace(b"/metrics", b"/v1/topics")

    def broken(*_: object) -> None:
        raise KeyError("a defect")

    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(produce + ready)
        await connection.until_written(b"ready")
        assert connection.transport.written.count(b"HTTP/1.1 200") == 2
        connection.transport.written = b""
        with monkeypatch.context() as patch:
            protocol.data_received(produce)
            patch.setattr(ledger, "apply_message", broken)
            protocol.data_received(produce + topics + ready)
        await connection.rest()
        protocol.data_received(produce + topics + ready)
        await connection.rest()
        assert connection.transport.written.count(b"HTTP/1.1 503") == 7
        assert connection.transport.written.count(b"HTTP/1.1 ") == 7
        assert not protocol.transport.closed

    on_a_connection(test)
