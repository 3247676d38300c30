"""Durable produce in batches of a thousand messages."""

from __future__ import annotations

import time
from collections.abc import Iterator

import uvloop

from bench.batches import BATCH, CONNECTIONS, batch_request, produce_batches
from bench.cores import BusyCores
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "batch"


def measure(setting: Setting) -> list[Row]:
    what = f"batches of {BATCH:,}, {CONNECTIONS} connections"
    row = Row(LOAD, what, "messages/s", [], Target(300_000))
    for _ in setting.each_run(LOAD):
        with setting.broker("batch") as broker:
            broker.create_topic()
            warm = uvloop.run(produce_batches(broker.port, _for(0.5)))
            with BusyCores(setting.cores) as busy:
                began = time.perf_counter()
                stored = uvloop.run(produce_batches(broker.port, _for(setting.seconds)))
                row.values.append(stored / (time.perf_counter() - began))
            if broker.stored() != warm + stored:
                raise BenchFailed(f"{broker.stored()} messages stored, {warm + stored} answered")
        row.note = str(busy)
    return [row]


def _for(seconds: float) -> Iterator[bytes]:
    """Sends the same bytes repeatedly, so that building them costs the load nothing."""
    request = batch_request()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield request
