"""Publishes to a durable stream beside produces to a topic, and the replay of a stream.

Publish and produce are measured in turns with the same client: one message per request on many
connections, and batches of a thousand. The replay reads the events over a WebSocket with binary
frames, and as lines over HTTP; it counts them by their offsets.
"""

from __future__ import annotations

import asyncio
import struct
import time

import uvloop

from bench.batches import BATCH, VALUE, batch_request
from bench.buffered_socket import BufferedSocket, open_socket
from bench.cores import BusyCores
from bench.lean_client import Asking, post
from bench.lean_socket import BINARY, LeanSocket, text_frame
from bench.processes import TOPIC, Broker
from bench.pubsub import EVENT_TEXT, SCOPE
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "durable_streams"
CONNECTIONS = 64
STREAM = "events"
STREAMS_PATH = "/v1/tenants/default/namespaces/default/streams"
WARM_S = 0.5

_KEPT_HEAD = struct.Struct("<BIQI")
_KEPT_KIND = 3


def measure(setting: Setting) -> list[Row]:
    singles = _rows(f"one a request, {CONNECTIONS} connections")
    batches = _rows(f"batches of {BATCH:,}")
    over_socket = Row(LOAD, "replay over a WebSocket, binary", "events/s", [], Target(500_000))
    over_http = Row(LOAD, "replay over HTTP, lines", "events/s", [])
    for _ in setting.each_run(LOAD):
        with setting.broker(LOAD) as broker:
            broker.create_topic()
            broker.ask("POST", STREAMS_PATH, {"name": STREAM, "delivery": "at_least_once"})
            _compare(setting, broker, singles, _produce_one(), _publish_one(), 1)
            _compare(setting, broker, batches, batch_request(), _publish_batch(), BATCH)
            end = _fill(broker, setting.messages)
            for row, reader in ((over_socket, _SocketReplay), (over_http, _LineReplay)):
                with BusyCores(setting.cores) as busy:
                    seconds = uvloop.run(_replay(broker.port, reader, end))
                row.values.append(end / seconds)
                row.note = f"{busy}; {end:,} events"
    return [*singles, *batches, over_socket, over_http]


def _rows(how: str) -> list[Row]:
    return [
        Row(LOAD, f"produce, {how}", "/s", []),
        Row(LOAD, f"publish, durable, {how}", "/s", []),
        Row(LOAD, f"publish : produce, {how}", "×", [], Target(0.8)),
    ]


def _produce_one() -> bytes:
    body = f'{{"topic":"{TOPIC}","key":"00000001","value":"{VALUE}"}}'
    return post("/v1/produce", body.encode())


def _publish_one() -> bytes:
    return post(f"{STREAMS_PATH}/{STREAM}/publish", f'{{"payload":"{EVENT_TEXT}"}}'.encode())


def _publish_batch() -> bytes:
    payloads = ",".join([f'"{EVENT_TEXT}"'] * BATCH)
    return post(f"{STREAMS_PATH}/{STREAM}/publish_batch", f'{{"payloads":[{payloads}]}}'.encode())


def _compare(
    setting: Setting, broker: Broker, rows: list[Row], produce: bytes, publish: bytes, count: int
) -> None:
    produced, published, ratio = rows
    connections = CONNECTIONS if count == 1 else 4
    for row, request in ((produced, produce), (published, publish)):
        uvloop.run(_send(broker.port, request, connections, WARM_S))
        with BusyCores(setting.cores) as busy:
            rate = uvloop.run(_send(broker.port, request, connections, setting.seconds))
        row.values.append(rate * count)
        row.note = str(busy)
    ratio.values.append(published.values[-1] / produced.values[-1])


async def _send(port: int, request: bytes, connections: int, seconds: float) -> float:
    """Sends the request over and over, one at a time per connection. Returns the rate."""
    until = time.perf_counter() + seconds

    async def send() -> int:
        connection = await Asking().connect(port)
        count = 0
        while time.perf_counter() < until:
            await connection.ask(request)
            count += 1
        connection.close()
        return count

    began = time.perf_counter()
    counts = await asyncio.gather(*(send() for _ in range(connections)))
    return sum(counts) / (time.perf_counter() - began)


def _fill(broker: Broker, messages: int) -> int:
    """Publishes until the stream has so many events. Returns where it ends."""

    async def fill() -> int:
        connection = await Asking().connect(broker.port)
        request = _publish_batch()
        while True:
            answer = await connection.ask(request)
            end = int(answer.rpartition(b'"offset":')[2].partition(b"}")[0]) + BATCH
            if end >= messages:
                connection.close()
                return end

    return uvloop.run(fill())


class _SocketReplay(LeanSocket):
    """Is ready when the event before `end` has come."""

    def __init__(self, end: int) -> None:
        super().__init__(BINARY, self._failed)
        self._end = end
        self._next = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _upgraded(self) -> None:
        super()._upgraded()
        message = f'{{"type":"subscribe",{SCOPE},"stream":"{STREAM}","start":"earliest"}}'
        self.write(text_frame(message.encode()))

    def _frame(self, kind: int, start: int, stop: int) -> None:
        if self._buffer[start] != _KEPT_KIND:
            return
        _, _, offset, count = _KEPT_HEAD.unpack_from(self._buffer, start)
        if offset != self._next:
            raise BenchFailed(f"offset {offset} came instead of {self._next}")
        self._next += count

    def _read(self) -> None:
        if self._next >= self._end and not self.done.done():
            self.done.set_result(None)


class _LineReplay(BufferedSocket):
    """Counts lines by their payloads."""

    def __init__(self, end: int) -> None:
        super().__init__(self._failed)
        self._left = end
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        path = f"{STREAMS_PATH}/{STREAM}/subscribe?start=earliest"
        self.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.ready.set_result(None)

    def _take(self, end: int) -> int:
        last = self._buffer.rfind(b"\n", 0, end) + 1
        self._left -= self._buffer.count(b'"payload":', 0, last)
        if self._left <= 0 and not self.done.done():
            self.done.set_result(None)
        return last


async def _replay(port: int, reader: type[_SocketReplay] | type[_LineReplay], end: int) -> float:
    began = time.perf_counter()
    socket = await open_socket(port, reader(end))
    await socket.done
    seconds = time.perf_counter() - began
    socket.close()
    return seconds
