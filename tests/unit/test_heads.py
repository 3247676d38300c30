"""A head that was understood before is not parsed again: nobody can tell, whatever is sent."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server import heads
from penstock.server.gate import Verdict
from penstock.server.heads import KnownHeads, Ordinary
from tests.unit.lane_connection import Connection, on_a_connection

HEAD = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
BODY = b'{"topic":"t","value":"v"}'
OF_ITS_OWN = re.compile(rb"(x-request-id|date): [^\r]*\r\n")


def produce(body: bytes = BODY, extra: bytes = b"") -> bytes:
    return HEAD % (len(body), extra) + body


HEALTH = b"GET /v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
REQUESTS = [
    produce(),
    produce(b'{"topic":"t","value":"w"}'),
    produce(b'{"topic":"t","value":"longer"}'),
    produce(b'{"topic":"nowhere","value":"v"}'),
    produce(b"\r\n\r\n" + b"x" * 21),
    produce(extra=b"Connection: close\r\n"),
    produce(extra=b"X-Request-Id: mine\r\n"),
    produce(extra=b"Expect: 100-continue\r\n"),
    produce(extra=b"Origin: http://elsewhere.example\r\n"),
    b"\r\n\r\n" + produce(),
    b"\r\n" + HEALTH,
    HEALTH,
    HEALTH + HEALTH,
    HEALTH + produce(),
    produce() * 3,
    produce() + b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" + produce(),
    produce()[:-3] + b"\n\n" + produce(b"\r\n\r\n" + b"x" * 21),
    HEAD.replace(b"\r\n", b"\n") % (len(BODY), b"") + b"\r\n\r\n" + BODY,
    produce() + produce(b'{"topic":"t","value":"longer"}'),
    b"GET /v1/topics?a=1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/topics HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
    b"GET /v1/topics HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
    b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"19\r\n" + BODY + b"\r\n0\r\n\r\n",
    b"garbage\r\n\r\n",
]


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Reads as a connection may have them: whole requests, mostly, some cut, some run together."""
    sent = draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=12))
    reads: list[bytes] = []
    for request in sent:
        cut = draw(st.one_of(st.just(0), st.integers(1, len(request) - 1)))
        is_joined = bool(reads) and draw(st.integers(0, 9)) == 0
        pieces = [request[:cut], request[cut:]] if cut else [request]
        if is_joined:
            reads[-1] += pieces.pop(0)
        reads.extend(pieces)
    return reads


async def answers(reads: list[bytes], *, remembers: bool, monkeypatch: pytest.MonkeyPatch) -> bytes:
    with monkeypatch.context() as patch:
        if not remembers:
            patch.setattr(KnownHeads, "request_at", lambda *_: None)
        connection = Connection()
        await connection.topic()
        try:
            for data in reads:
                if not connection.transport.closed:
                    connection.lane.data_received(data)
                for _ in range(10):
                    await asyncio.sleep(0)
        finally:
            connection.lane.connection_lost(None)
            connection.engine.close()
    return OF_ITS_OWN.sub(b"", connection.transport.written)


@given(reads=conversations())
def test_answers_are_the_same_as_without_a_memory(reads: list[bytes]) -> None:
    monkeypatch = pytest.MonkeyPatch()

    async def both() -> None:
        with_memory = await answers(reads, remembers=True, monkeypatch=monkeypatch)
        assert with_memory == await answers(reads, remembers=False, monkeypatch=monkeypatch)

    asyncio.run(both())


def test_a_head_that_comes_again_is_not_parsed() -> None:
    async def test(connection: Connection) -> None:
        lane = connection.lane
        lane.data_received(produce())
        lane.parser = None  # whoever needs it now fails
        await connection.until_written(b"produced")
        connection.transport.written = b""
        lane.data_received(produce(b'{"topic":"t","value":"2"}'))
        await connection.until_written(b"produced")
        connection.transport.written = b""
        lane.data_received(produce() * 3)
        await connection.until_written(b"produced")
        assert connection.transport.written.count(b"produced") == 3

    on_a_connection(test)


def test_a_head_is_learned_from_the_first_of_many() -> None:
    async def test(connection: Connection) -> None:
        lane = connection.lane
        lane.data_received(produce() + produce(b'{"topic":"t","value":"longer"}') + produce()[:9])
        lane.data_received(produce()[9:])
        assert len(lane.hub.heads) == 1
        lane.parser = None
        lane.data_received(produce())
        await connection.until_written(b"produced")

    on_a_connection(test)


def test_only_whole_requests_that_begin_with_their_own_line_are_kept() -> None:
    known = KnownHeads()
    ordinary = Ordinary(b"POST", b"/v1/produce", Verdict(content_length=len(BODY)))
    for data in (
        b"\r\n\r\n" + produce(),
        produce()[:-1],
        HEAD % (len(BODY), b"A: " + b"a" * heads.MAX_HEAD_BYTES + b"\r\n") + BODY,
    ):
        known.keep(data, ordinary)
        assert len(known) == 0
    known.keep(produce() + b"G", None)
    assert len(known) == 0
    known.keep(produce() + b"G", ordinary)
    for before, after in ((b"", b""), (b"", b"G"), (b"something", produce())):
        data = before + produce() + after
        found = known.request_at(data, len(before))
        assert found is not None
        request, end = found
        assert (request.method, request.path, request.body) == (b"POST", b"/v1/produce", BODY)
        assert data[end:] == after
    assert known.request_at(produce(), 1) is None
    assert known.request_at(produce()[:-1], 0) is None
    assert known.request_at(b"", 0) is None


def test_what_is_kept_is_bounded() -> None:
    known = KnownHeads()
    for n in range(heads.MAX_HEADS + 10):
        data = b"GET /v1/%d HTTP/1.1\r\n\r\n" % n
        known.keep(data, Ordinary(b"GET", b"/v1/%d" % n, Verdict()))
        assert 0 < len(known) <= heads.MAX_HEADS
        assert known.request_at(data, 0) is not None
