"""A minimal HTTP/1.1 client: raw sockets, pipelined requests, no library.

It understands only the broker's own answers, so that the client costs little and the benchmark
measures the broker. Errors on a connection, also those that a callback raises, go to `on_error`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from bench.rows import BenchFailed

OnReply = Callable[[int, bytes], None]
OnError = Callable[[Exception], None]


class Item(msgspec.Struct, gc=False):
    """The members of a delivery that an ack needs; the rest of the line is skipped."""

    partition: int
    offset: int
    attempts: int


OnItems = Callable[[list[Item]], None]
_decode_lines = msgspec.json.Decoder(Item).decode_lines


class _Socket(asyncio.Protocol):
    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._rest = b""
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_closing:
            self._on_error(BenchFailed(f"the broker closed the connection ({exc})"))

    def close(self) -> None:
        self._is_closing = True
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._rest = self._take(self._rest + data)
        except Exception as error:  # noqa: BLE001 - the loop would only log it, and the load hang
            self.close()
            self._on_error(error)

    def _take(self, data: bytes) -> bytes:
        """Takes what is complete and returns the rest."""
        raise NotImplementedError


class Connection(_Socket):
    """Passes answers to `on_reply`, in the order of the requests. An answer that is neither a
    success nor has the status `expected` is an error."""

    def __init__(self, on_reply: OnReply, on_error: OnError, expected: int = 200) -> None:
        super().__init__(on_error)
        self._on_reply = on_reply
        self._expected = expected
        self._need = 0

    def _take(self, data: bytes) -> bytes:
        at, size = 0, len(data)
        while size - at >= self._need and (end := data.find(b"\r\n\r\n", at)) >= 0:
            body = end + 4
            stop = body + _content_length(data, at, end)
            if stop > size:
                self._need = stop - at
                break
            self._need = 0
            status = int(data[at + 9 : at + 12])
            if not 200 <= status < 300 and status != self._expected:
                raise BenchFailed(f"the broker answered {data[at:stop].decode(errors='replace')}")
            self._on_reply(status, data[body:stop])
            at = stop
        return data[at:]


class ConsumeStream(_Socket):
    """Passes the items of each chunk to `on_items`."""

    def __init__(self, request: bytes, on_items: OnItems, on_error: OnError) -> None:
        super().__init__(on_error)
        self._request = request
        self._on_items = on_items
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(self._request)

    def _take(self, data: bytes) -> bytes:
        at = 0
        if not self._has_begun:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return data
            if not data.startswith(b"HTTP/1.1 200"):
                raise BenchFailed(f"consume was refused: {data.decode(errors='replace')}")
            self._has_begun = True
            at = end + 4
        while (line := data.find(b"\r\n", at)) >= 0:
            start = line + 2
            stop = start + int(data[at:line], 16)
            if len(data) < stop + 2:
                break
            self._on_items(_decode_lines(data[start:stop]))
            at = stop + 2
        return data[at:]


class Asking:
    """A connection for awaiting single answers, for few or large requests."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[bytes]] = deque()

    async def connect(self, port: int) -> Asking:
        self._connection = await connect(port, self._replied, self._failed)
        return self

    async def ask(self, request: bytes) -> bytes:
        """Returns the body of the answer; raises BenchFailed unless it is a 2xx."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._connection.write(request)
        return await answer

    def close(self) -> None:
        self._connection.close()

    def _replied(self, _: int, body: bytes) -> None:
        self._waiting.popleft().set_result(body)

    def _failed(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().set_exception(error)


async def connect(
    port: int, on_reply: OnReply, on_error: OnError, expected: int = 200
) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(on_reply, on_error, expected), "127.0.0.1", port
    )
    return connection


async def consume(
    port: int, topic: str, group: str, on_items: OnItems, on_error: OnError
) -> ConsumeStream:
    query = f"topic={topic}&group={group}&owner={OWNER}&lease_ms=600000"
    request = f"GET /v1/consume?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(
        lambda: ConsumeStream(request, on_items, on_error), "127.0.0.1", port
    )
    return stream


OWNER = "bench"


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Returns the bytes of a POST request."""
    lines = ["Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "\r\n"]).encode() + body


def ack_body(topic: str, group: str, item: Item) -> bytes:
    return b'{"topic":"%b","group":"%b","owner":"%b","partition":%d,"offset":%d}' % (
        topic.encode(),
        group.encode(),
        OWNER.encode(),
        item.partition,
        item.offset,
    )


def _content_length(data: bytes, start: int, end: int) -> int:
    """Returns the `Content-Length`, or 0 without the header, as in a 204."""
    at = data.find(b"content-length: ", start, end)
    if at < 0:
        return 0
    stop = data.find(b"\r", at, end + 2)
    return int(data[at + 16 : stop])
