"""Latency of producers while a group reads a million old messages back from disk.

It has no target. The messages are sealed, no longer in the broker's memory and, as far as the
system allows, no longer in the page cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from bench.batches import VALUE, batch_requests, produce_batches
from bench.lean_client import post
from bench.paced_produce import PacedProduce
from bench.processes import ROOT, TOPIC, Broker
from bench.rows import BenchFailed, Row
from bench.setting import Setting

LOAD = "isolation"
PER_SECOND = 2000
MEMORY_BYTES = 32 << 20
_REQUEST = post("/v1/produce", f'{{"topic":"{TOPIC}","key":"k","value":"{VALUE}"}}'.encode())


def measure(setting: Setting) -> list[Row]:
    p99 = f"produce p99 at {PER_SECOND:,}/s"
    alone = Row(LOAD, f"{p99}, alone", "ms", [])
    beside = Row(LOAD, f"{p99}, beside a lagging group", "ms", [])
    ratio = Row(LOAD, "beside : alone", "×", [])
    broker = setting.broker("isolation", memory_bytes=MEMORY_BYTES, max_in_flight=10_000)
    setting.say(f"{LOAD}: preparing {setting.messages:,} messages on disk")
    with broker:
        broker.create_topic()
        uvloop.run(produce_batches(broker.port, batch_requests(setting.messages)))
        broker.seal_everything()
        for run in setting.each_run(LOAD):
            alone.values.append(_p99(setting, broker))
            _forget_cached(broker)
            with _lagging_reader(setting, broker, f"lagging-{run}"):
                before = _page_reads(broker)
                beside.values.append(_p99(setting, broker))
                pages = _page_reads(broker) - before
            beside.note = f"{pages / setting.seconds:,.0f} pages a second were read back"
            ratio.values.append(beside.values[-1] / alone.values[-1])
    return [alone, beside, ratio]


def _p99(setting: Setting, broker: Broker) -> float:
    load = PacedProduce(PER_SECOND, _REQUEST)
    uvloop.run(load.run(broker.port, setting.seconds))
    return load.p99


@contextmanager
def _lagging_reader(setting: Setting, broker: Broker, group: str) -> Iterator[None]:
    """Runs the reader while the block runs; it has started to read when the block begins."""
    before = _page_reads(broker)
    arguments = [str(broker.port), str(setting.messages), group]
    reader = subprocess.Popen([sys.executable, "-m", "bench.lagging_reader", *arguments], cwd=ROOT)
    try:
        while _page_reads(broker) == before:
            if reader.poll() is not None:
                raise BenchFailed("the lagging reader ended")
            time.sleep(0.05)
        yield
    finally:
        reader.kill()
        reader.wait()


def _page_reads(broker: Broker) -> float:
    return broker.metric("penstock_page_reads_total")


def _forget_cached(broker: Broker) -> None:
    for path in broker.data.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
