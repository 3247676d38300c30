"""A head that was understood before is not parsed again: nobody can tell, whatever is sent."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.http import head_cache as heads
from penstock.server.http.head_cache import CacheableRequest, HeadCache
from penstock.server.http.requests import NO_NOTES, Request
from tests.unit.memory_connection import MemoryConnection, on_a_connection

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


async def answers(reads: list[bytes], *, is_remembering: bool) -> bytes:
    connection = MemoryConnection(is_remembering=is_remembering)
    await connection.topic()
    try:
        for data in reads:
            if not connection.transport.closed:
                connection.protocol.data_received(data)
            await connection.rest()
    finally:
        connection.protocol.connection_lost(None)
        connection.engine.close()
    return OF_ITS_OWN.sub(b"", connection.transport.written)


@given(reads=conversations())
def test_answers_are_the_same_as_without_a_memory(reads: list[bytes]) -> None:
    async def both() -> None:
        with_memory = await answers(reads, is_remembering=True)
        assert with_memory == await answers(reads, is_remembering=False)

    asyncio.run(both())


def test_a_head_that_comes_again_is_not_parsed() -> None:
    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(produce())
        protocol.parser = None  # whoever needs it now fails
        await connection.until_written(b"produced")
        connection.transport.written = b""
        protocol.data_received(produce(b'{"topic":"t","value":"2"}'))
        await connection.until_written(b"produced")
        connection.transport.written = b""
        protocol.data_received(produce() * 3)
        await connection.until_written(b"produced")
        assert connection.transport.written.count(b"produced") == 3

    on_a_connection(test)


def test_a_head_is_learned_from_the_first_of_many() -> None:
    async def test(connection: MemoryConnection) -> None:
        protocol = connection.protocol
        protocol.data_received(
            produce() + produce(b'{"topic":"t","value":"longer"}') + produce()[:9]
        )
        protocol.data_received(produce()[9:])
        assert len(protocol.dispatch.head_cache) == 1
        protocol.parser = None
        protocol.data_received(produce())
        await connection.until_written(b"produced")

    on_a_connection(test)


def ordinary_produce(
    *extra: tuple[bytes, bytes], length: bytes = b"%d" % len(BODY)
) -> CacheableRequest:
    """As the parser reports it."""
    headers = [(b"host", b"localhost"), (b"content-length", length), *extra]
    return CacheableRequest(
        b"/v1/produce", headers, Request(b"POST", b"/v1/produce", b"", NO_NOTES, BODY)
    )


def test_only_whole_requests_that_begin_with_their_own_line_are_kept() -> None:
    known = HeadCache()
    ordinary = ordinary_produce()
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


@pytest.mark.parametrize("length", [b"25 ", b"025", b"+25", b"25\t", b"0", b"24", b"25, 25"])
def test_a_head_whose_length_could_be_read_differently_is_not_kept(length: bytes) -> None:
    """driftq-65: whatever the parser made of it."""
    known = HeadCache()
    head = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: %b\r\n\r\n" % length
    known.keep(head + BODY, ordinary_produce(length=length))
    assert len(known) == 0


@pytest.mark.parametrize(
    ("written", "reported"),
    [
        (b"A:b\r\n", (b"a", b"b")),
        (b"A:  b\r\n", (b"a", b"b")),
        (b"A: b\n", (b"a", b"b")),
        (b"A: b\r\n c\r\n", (b"a", b"b c")),
        (b"Transfer-Encoding: chunked\r\n", (b"transfer-encoding", b"chunked")),
        (b"Content-Length: 25\r\n", (b"content-length", b"25")),
        (b"", (b"a", b"b")),
    ],
)
def test_a_head_that_is_not_written_plainly_is_not_kept(
    written: bytes, reported: tuple[bytes, bytes]
) -> None:
    """driftq-65: its end might not be where it seems to be."""
    known = HeadCache()
    known.keep(produce(extra=written), ordinary_produce(reported))
    assert len(known) == 0
    known.keep(produce(extra=b"A: b\r\n"), ordinary_produce((b"a", b"b")))
    assert len(known) == 1


def test_what_is_kept_is_bounded() -> None:
    known = HeadCache()
    for n in range(heads.MAX_HEADS + 10):
        data = b"GET /v1/%d HTTP/1.1\r\n\r\n" % n
        known.keep(data, CacheableRequest(b"/v1/%d" % n, [], Request(b"GET", b"/v1/%d" % n, b"")))
        assert 0 < len(known) <= heads.MAX_HEADS
        assert known.request_at(data, 0) is not None
