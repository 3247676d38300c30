"""Transactions of one produce and one ack, with and without an id, beside plain produces.

All three take turns within a run, on one broker, sent by the same client over one pipelined
connection. The messages that are acked are produced and delivered before, so that the figure has
neither in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import uvloop

from bench.batches import BATCH, GROUP, VALUE, batch_requests, produce_batches
from bench.cores import BusyCores
from bench.lean_client import Connection, Item, ack_body, connect, consume, post
from bench.processes import TOPIC, Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "transactions"
RESULTS = "results"
IN_THE_AIR = 64
MOST = 40_000
"""Requests of each kind in a run. A group has at most 100,000 unfinished messages."""

_PRODUCE = b'"topic":"%b","key":"k","value":"%b"}' % (RESULTS.encode(), VALUE.encode())


def measure(setting: Setting) -> list[Row]:
    plain = Row(LOAD, f"produce, {IN_THE_AIR} in the air", "/s", [])
    bare = Row(LOAD, "one produce and one ack", "/s", [])
    named = Row(LOAD, "one produce and one ack, with an id", "/s", [])
    of_bare = Row(LOAD, "transaction : produce", "×", [], Target(0.5))
    of_named = Row(LOAD, "transaction with an id : produce", "×", [])
    count = min(MOST, setting.messages // 4 // BATCH * BATCH)
    for _ in setting.each_run(LOAD):
        with setting.broker("transactions", max_in_flight=2 * count) as broker:
            items = _deliver(broker, 2 * count)
            produce = post("/v1/produce", b"{" + _PRODUCE)
            turns = (
                (plain, [produce] * count),
                (bare, [_transaction(item) for item in items[:count]]),
                (named, [_transaction(item, f"tx-{item.offset}") for item in items[count:]]),
            )
            uvloop.run(Pipeline(iter([produce] * BATCH)).run(broker.port))
            for row, sent in turns:
                with BusyCores(setting.cores) as busy:
                    row.values.append(uvloop.run(Pipeline(iter(sent)).run(broker.port)))
                row.note = str(busy)
            _check(broker, 3 * count + BATCH)
        of_bare.values.append(bare.values[-1] / plain.values[-1])
        of_named.values.append(named.values[-1] / plain.values[-1])
    return [plain, bare, named, of_bare, of_named]


def _transaction(item: Item, name: str = "") -> bytes:
    ack = b'{"op":"ack",' + ack_body(TOPIC, GROUP, item)[1:]
    head = b'"transaction_id":"%b",' % name.encode() if name else b""
    produce = b'{"op":"produce",' + _PRODUCE
    body = b'{%b"operations":[%b,%b]}' % (head, produce, ack)
    return post("/v1/transactions", body)


def _deliver(broker: Broker, count: int) -> list[Item]:
    """Produces messages and lets a consumer have all of them, which keeps its leases."""
    broker.create_topic()
    broker.create_topic(RESULTS)
    uvloop.run(produce_batches(broker.port, batch_requests(count)))

    async def take() -> list[Item]:
        items: list[Item] = []
        arrived: asyncio.Queue[list[Item] | Exception] = asyncio.Queue()
        stream = await consume(broker.port, TOPIC, GROUP, arrived.put_nowait, arrived.put_nowait)
        while len(items) < count:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            items += got
        stream.close()
        return items

    found: list[Item] = uvloop.run(take())
    return found


def _check(broker: Broker, results: int) -> None:
    report = msgspec.json.decode(broker.ask("GET", f"/v1/topics/{TOPIC}"))
    lag = report["groups"][0]["partitions"][0]["lag"]
    if lag or broker.stored(RESULTS) != results:
        raise BenchFailed(f"{broker.stored(RESULTS)} results of {results}, {lag} not acked")


class Pipeline:
    """Sends requests with a fixed number in progress; every answer starts the next one."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._answered = 0
        self._in_the_air = 0
        self._freed = 0
        self._connection: Connection
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]

    async def run(self, port: int) -> float:
        """Returns the requests per second."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._connection = await connect(port, self._replied, self._failed)
        began = time.perf_counter()
        self._send(IN_THE_AIR)
        await self._ended
        took = time.perf_counter() - began
        self._connection.close()
        return self._answered / took

    def _send(self, count: int) -> None:
        found = [request for _, request in zip(range(count), self._requests, strict=False)]
        self._in_the_air += len(found)
        if found:
            self._connection.write(b"".join(found))
        elif not self._in_the_air and not self._ended.done():
            self._ended.set_result(None)

    def _replied(self, _: int, body: bytes) -> None:
        if not self._freed:
            # Answers that come together lead to requests that are sent together.
            self._loop.call_soon(self._go_on)
        self._freed += 1

    def _go_on(self) -> None:
        freed, self._freed = self._freed, 0
        self._answered += freed
        self._in_the_air -= freed
        self._send(freed)

    def _failed(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
