"""The caches of heads and of verdicts, against a connection that has neither.

Whatever is sent, in whatever pieces and however often: the same requests are handled, and the same
bytes are answered, but for the date and the request ids that the broker makes up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from random import Random

import pytest

from penstock.server.http.requests import Notes, Request
from penstock.server.http.response_order import Reply
from tests.fuzz import request_heads as heads
from tests.unit.memory_connection import MemoryConnection

CONVERSATIONS = 1500
"""Of one seed; some seconds."""

OF_ITS_OWN = re.compile(rb"(x-request-id|date): [^\r]*\r\n")

Handled = tuple[bytes, bytes, bytes, Notes, bytes]


class Side:
    """One broker in memory that is sent everything; what it handled and answered."""

    def __init__(self, *, is_remembering: bool) -> None:
        self.connection = MemoryConnection(is_remembering=is_remembering)
        self.handled: list[Handled] = []
        handle = self.connection.dispatch.handle

        def noting(request: Request, reply: Reply) -> None:
            fields = (request.method, request.path, request.query, request.notes)
            self.handled.append((*fields, request.body))
            handle(request, reply)

        self.connection.dispatch.handle = noting  # type: ignore[method-assign]

    async def talk(
        self, reads: list[bytes], pauses: Sequence[int] = (6,)
    ) -> tuple[list[Handled], bytes, bool]:
        """On a connection of its own: what was handled, answered, and is it closed? `pauses` are
        the turns that the broker has between two reads."""
        connection = self.connection
        connection.connect()
        self.handled = []
        for data, pause in zip(reads, cycle(pauses), strict=False):
            if not connection.transport.closed:
                connection.protocol.data_received(data)
            await connection.rest(pause)
        await connection.rest(20)
        outcome = (
            self.handled,
            OF_ITS_OWN.sub(b"", connection.transport.written),
            connection.transport.closed,
        )
        connection.protocol.connection_lost(None)
        return outcome


def with_both_sides(test: Callable[[Side, Side], Awaitable[None]]) -> None:
    async def run() -> None:
        sides = Side(is_remembering=True), Side(is_remembering=False)
        for side in sides:
            await side.connection.topic()
        try:
            await test(*sides)
        finally:
            for side in sides:
                side.connection.engine.close()

    asyncio.run(run())


async def assert_same(
    cached: Side, plain: Side, reads: list[bytes], pauses: Sequence[int] = (6,)
) -> None:
    with_cache, without = await cached.talk(reads, pauses), await plain.talk(reads, pauses)
    assert with_cache == without, f"sent: {reads!r}"


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_of_heads_changes_no_request_and_no_answer(seed: int) -> None:
    """driftq-65, driftq-68: random and damaged heads, cut anywhere, repeated and pipelined."""

    async def test(cached: Side, plain: Side) -> None:
        random = Random(seed)
        for _ in range(CONVERSATIONS):
            reads = heads.conversation(random)
            await assert_same(cached, plain, reads, random.choice([(6,), (0,), (0, 0, 6)]))
        assert len(cached.connection.dispatch.head_cache) > 10
        assert len(plain.connection.dispatch.head_cache) == 0

    with_both_sides(test)


def smuggling(length: bytes, extra: bytes = b"") -> bytes:
    """A produce with a request in its body, behind a head that may say something else."""
    body = heads.PRODUCE + heads.SMUGGLED
    line = b"POST /v1/produce HTTP/1.1\r\nHost: localhost\r\n"
    return line + length.replace(b"#", b"%d" % len(body)) + b"\r\n" + extra + b"\r\n" + body


TRICKY = [
    smuggling(b"Content-Length: #"),
    smuggling(b"Content-Length: # "),
    smuggling(b"Content-Length:\t#\t"),
    smuggling(b"Content-Length: 0#"),
    smuggling(b"Content-Length: #", b"Connection: upgrade\r\nUpgrade: h2c\r\n"),
    smuggling(b"Content-Length: # ", b"Connection: keep-alive\r\n"),
    smuggling(b"Content-Length: #", b"Connection: close\r\n"),
    smuggling(b"Content-Length: #", b"Content-Length: 0\r\n"),
    smuggling(b"Content-Length: 0", b"X: y\r\n"),
    smuggling(b"X-A: b\r\n Content-Length: 0\r\nContent-Length: #"),
    smuggling(b"Transfer-Encoding: chunked", b"Content-Length: 3\r\n"),
    b"GET /v1/topics HTTP/1.0\r\nX: y\r\n\r\n",
    b"GET /v1/topics HTTP/1.1\r\nX: y\r\n\r\n",
    b"GET /v1/topics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    b"GET /v1/topics HTTP/1.1\r\nConnection: keep-alive\r\n\r\n",
    b"GET /v1/topics HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
    b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n",
]


@pytest.mark.parametrize("data", TRICKY)
def test_a_request_cut_anywhere_and_sent_again_is_the_same_with_a_cache(data: bytes) -> None:
    """driftq-65: cut at every position; whole before and after it, and twice in one read."""

    async def test(cached: Side, plain: Side) -> None:
        for place in range(1, len(data)):
            await assert_same(cached, plain, [data, data[:place], data[place:], data + data])

    with_both_sides(test)
