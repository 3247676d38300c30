"""Produce, consume and ack with 64 messages in progress, durable, beside Redis Streams.

Single acks (pipelined) are compared with an XACK per message, and batches of acks with one XACK
for all messages that arrived. The broker gets the lean client of this directory, Redis its Python
client.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import uvloop

from bench.batches import GROUP, VALUE
from bench.cores import BusyCores
from bench.lean_client import Connection, Item, ack_body, connect, consume, post
from bench.processes import TOPIC, Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

try:
    from bench.redis_cycle import RedisCycle
except ModuleNotFoundError:
    RedisCycle = None  # type: ignore[assignment,misc]

LOAD = "cycle"
IN_THE_AIR = 64


def measure(setting: Setting) -> list[Row]:
    single = _rows("an ack a message", "an XACK a message")
    batch = _rows("acks in batches", "an XACK for all that arrived")
    for _ in setting.each_run(LOAD):
        for (ours, theirs, ratio), batch_acks in ((single, False), (batch, True)):
            ours.values.append(_broker(setting, ours, batch_acks=batch_acks))
            note = setting.lacks("redis-server") or _no_client()
            if note:
                theirs.note = ratio.note = note
                continue
            theirs.values.append(_redis(setting, theirs, batch_acks=batch_acks))
            ratio.values.append(ours.values[-1] / theirs.values[-1])
    return single + batch


def _rows(ours: str, theirs: str) -> list[Row]:
    return [
        Row(LOAD, f"Penstock, {IN_THE_AIR} in the air, {ours}", "/s", [], Target(10_000)),
        Row(LOAD, f"Redis Streams, always, {theirs}", "/s", []),
        Row(LOAD, f"Penstock : Redis, {ours}", "×", [], Target(1.3)),
    ]


def _broker(setting: Setting, row: Row, *, batch_acks: bool) -> float:
    with setting.broker("cycle") as broker:
        broker.create_topic()
        warm = BrokerCycle(IN_THE_AIR, batch_acks=batch_acks)
        uvloop.run(warm.run(broker.port, 0.5))
        cycle = BrokerCycle(IN_THE_AIR, batch_acks=batch_acks)
        with BusyCores(setting.cores) as busy:
            rate: float = uvloop.run(cycle.run(broker.port, setting.seconds))
        _check_all_done(broker, warm.done + cycle.done)
    row.note = str(busy)
    return rate


def _check_all_done(broker: Broker, count: int) -> None:
    report = msgspec.json.decode(broker.ask("GET", f"/v1/topics/{TOPIC}"))
    lag = report["groups"][0]["partitions"][0]["lag"]
    if lag or broker.stored() != count:
        raise BenchFailed(f"{count} cycles; {broker.stored()} messages stored, {lag} not acked")


def _redis(setting: Setting, row: Row, *, batch_acks: bool) -> float:
    """Returns the better figure of the two ways to write the client."""
    rates: dict[str, float] = {}
    for way in ("three", "rounds"):
        with setting.redis_server() as server:
            cycle = RedisCycle(IN_THE_AIR, batch_acks=batch_acks)
            run = cycle.run_in_three if way == "three" else cycle.run_in_rounds
            rates[way] = uvloop.run(run(server.port, setting.seconds))
    three, rounds = rates["three"], rates["rounds"]
    row.note = f"the better of three connections ({three:,.0f}) and rounds ({rounds:,.0f})"
    return max(three, rounds)


def _no_client() -> str:
    return "the Python package redis is not installed" if RedisCycle is None else ""


# -- the load --------------------------------------------------------------------------------------

_PRODUCE = post("/v1/produce", f'{{"topic":"{TOPIC}","key":"k","value":"{VALUE}"}}'.encode())


class BrokerCycle:
    """Keeps a fixed number of messages in progress: from the write of a produce until the answer to
    the ack. One connection produces, one consumes, one acks; all are pipelined."""

    def __init__(self, in_the_air: int, *, batch_acks: bool) -> None:
        self.done = 0
        self._in_the_air = in_the_air
        self._batch_acks = batch_acks
        self._freed = 0
        self._until = 0.0
        self._produces: Connection
        self._acks: Connection
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]

    async def run(self, port: int, seconds: float) -> float:
        """Returns the cycles per second, from the first produce to the last ack."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        stream = await consume(port, TOPIC, GROUP, self._arrived, self._failed)
        self._produces = await connect(port, _ignore, self._failed)
        self._acks = await connect(port, self._acked, self._failed)
        began = time.perf_counter()
        self._until = began + seconds
        self._produces.write(_PRODUCE * self._in_the_air)
        await self._ended
        took = time.perf_counter() - began
        for connection in (stream, self._produces, self._acks):
            connection.close()
        return self.done / took

    def _arrived(self, items: list[Item]) -> None:
        if any(item.attempts != 1 for item in items):
            raise BenchFailed("a message was delivered twice")
        bodies = [ack_body(TOPIC, GROUP, item) for item in items]
        if self._batch_acks:
            self._acks.write(post("/v1/ack/batch", b"[" + b",".join(bodies) + b"]"))
        else:
            self._acks.write(b"".join([post("/v1/ack", body) for body in bodies]))

    def _acked(self, _: int, body: bytes) -> None:
        if not self._freed:
            # Acks that are answered together lead to produces that are sent together.
            self._loop.call_soon(self._go_on)
        self._freed += body.count(b'"acked"') if self._batch_acks else 1

    def _go_on(self) -> None:
        freed, self._freed = self._freed, 0
        self.done += freed
        if time.perf_counter() < self._until:
            self._produces.write(_PRODUCE * freed)
        else:
            self._in_the_air -= freed
            if self._in_the_air < 0:
                self._failed(BenchFailed("more was acked than produced: the topic was not empty"))
            elif not self._in_the_air and not self._ended.done():
                self._ended.set_result(None)

    def _failed(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


def _ignore(status: int, body: bytes) -> None:
    """Ignores the answer to a produce: the message itself shows that it worked."""
