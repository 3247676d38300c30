"""Pipelines of thousands of requests in one read: nothing nests, and every one is answered."""

from __future__ import annotations

import pytest

from penstock.server.http.dispatch import Handler, RequestDispatch
from penstock.server.http.requests import Request
from penstock.server.http.response_order import Reply
from tests.unit.memory_connection import MemoryConnection, on_a_connection

COUNT = 3000
"""More than Python nests calls."""


def get(path: bytes, *headers: bytes) -> bytes:
    lines = [b"GET %b HTTP/1.1" % path, b"Host: localhost", *headers, b"", b""]
    return b"\r\n".join(lines)


def answer_when_room(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    reply.when_room(0, lambda: reply.send_json(200, {}))


def answer_when_first(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    """A stream that ends as soon as it has begun."""

    def begin() -> None:
        protocol = reply.open_stream(b"")
        protocol.stream = object()
        protocol.end_stream()

    reply.when_first(begin)


def refuse_when_first(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    def begin() -> None:
        raise ZeroDivisionError("a defect")

    reply.when_first(begin)


@pytest.mark.parametrize(
    ("handler", "status"),
    [
        (answer_when_room, b"HTTP/1.1 200"),
        (answer_when_first, b"HTTP/1.1 200"),
        (refuse_when_first, b"HTTP/1.1 500"),
    ],
)
@pytest.mark.parametrize("is_held_up", [True, False])
def test_a_long_pipeline_is_answered_whole(
    handler: Handler, status: bytes, is_held_up: bool
) -> None:
    """driftq-65: answers that wait for their turn, and come all at once when the first is given."""

    async def test(connection: MemoryConnection) -> None:
        held: list[Reply] = []
        routes = connection.dispatch.routes
        connection.dispatch.routes = routes | {
            b"/v1/first": {b"GET": lambda dispatch, request, reply: held.append(reply)},
            b"/v1/other": {b"GET": handler},
        }
        first = get(b"/v1/first") if is_held_up else b""
        connection.protocol.data_received(first + get(b"/v1/other") * COUNT)
        if is_held_up:
            assert status not in connection.transport.written
            held[0].send_json(404, {})
        await connection.rest()
        assert connection.transport.written.count(status) == COUNT
        assert not connection.transport.closed

    on_a_connection(test)


def test_a_defect_in_the_connection_itself_is_answered_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """driftq-65: in a callback of the parser, and on the way to a WebSocket."""
    wish = (
        get(b"/v1/felix/ws", b"Connection: Upgrade", b"Upgrade: websocket"),
        get(b"/v1/healthz"),
        get(b"/docs"),
    )

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async def test(connection: MemoryConnection) -> None:
        monkeypatch.setattr(connection.dispatch.admission, "judge", broken)
        for data in wish:
            caplog.clear()
            connection.connect()
            connection.protocol.data_received(data)
            await connection.rest()
            assert connection.transport.written.startswith(b"HTTP/1.1 500")
            assert b'"error":"INTERNAL"' in connection.transport.written
            assert connection.transport.closed
            errors = [record for record in caplog.records if record.levelname == "ERROR"]
            assert len(errors) == 1
            assert errors[0].exc_info is not None
            assert errors[0].exc_info[0] is ZeroDivisionError

    on_a_connection(test)
