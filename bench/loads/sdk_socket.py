"""Publishes with the SDK: over HTTP, and over its socket with ack per_message and none.

One asyncio client publishes one event of 100 bytes after the other to a stream that nobody reads.
With ack none the run ends when the broker has handled the last event. The last rows compare within
the run.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import uvloop

from bench.cores import BusyCores
from bench.processes import Broker
from bench.rows import BenchFailed, Row
from bench.setting import Setting
from penstock.client import AsyncClient, AsyncSocket

LOAD = "sdk_socket"
EVENT = b"x" * 100
WARM_S = 0.3
LOOK = 64
"""Publishes between two looks at the clock."""

Publish = Callable[[], Awaitable[object]]


def measure(setting: Setting) -> list[Row]:
    http = Row(LOAD, "publish over HTTP", "events/s", [])
    acked = Row(LOAD, "publish over the socket, ack per_message", "events/s", [])
    none = Row(LOAD, "publish over the socket, ack none", "events/s", [])
    acked_ratio = Row(LOAD, "ack per_message : HTTP", "×", [])
    none_ratio = Row(LOAD, "ack none : HTTP", "×", [])
    for _ in setting.each_run(LOAD):
        with setting.broker("sdk-socket") as broker:
            uvloop.run(_run(setting, broker, http, acked, none))
        acked_ratio.values.append(acked.values[-1] / http.values[-1])
        none_ratio.values.append(none.values[-1] / http.values[-1])
    return [http, acked, none, acked_ratio, none_ratio]


async def _run(setting: Setting, broker: Broker, http: Row, acked: Row, none: Row) -> None:
    url = f"http://127.0.0.1:{broker.port}"
    async with AsyncClient(url) as client, client.connect() as socket:
        over_http, over_socket = client.stream("default"), socket.stream("default")
        ways: dict[str, tuple[Row, Publish]] = {
            "http": (http, lambda: over_http.publish(EVENT)),
            "acked": (acked, lambda: over_socket.publish(EVENT)),
            "none": (none, lambda: over_socket.publish(EVENT, ack="none")),
        }
        for row, publish in ways.values():
            await _rate(socket, publish, WARM_S)
            before = await _published(broker)
            with BusyCores(setting.cores) as busy:
                count, rate = await _rate(socket, publish, setting.seconds)
            row.note = str(busy)
            row.values.append(rate)
            found = await _published(broker) - before
            if found != count:
                raise BenchFailed(f"{count} events were published, the broker counts {found}")


async def _rate(socket: AsyncSocket, publish: Publish, seconds: float) -> tuple[int, float]:
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(LOOK):
            await publish()
        count += LOOK
    await socket.flush()
    return count, count / (time.perf_counter() - begin)


async def _published(broker: Broker) -> int:
    """Returns how many events the broker has accepted."""
    text = (await asyncio.to_thread(broker.ask, "GET", "/metrics")).decode()
    found = re.findall(r"^penstock_stream_published_total\S* (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))
