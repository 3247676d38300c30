"""Memory that a retained small message takes beyond its key and value."""

from __future__ import annotations

import uvloop

from bench.batches import BATCH, PAYLOAD_BYTES, batch_requests, produce_batches
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "memory"
ENOUGH = 16 << 30
"""Large, so that no message is evicted."""


def measure(setting: Setting) -> list[Row]:
    count = setting.messages
    what = f"resident memory a message beside its {PAYLOAD_BYTES} bytes, {count:,} messages"
    row = Row(LOAD, what, "bytes", [], Target(600, at_most=True))
    for _ in setting.each_run(LOAD):
        with setting.broker("memory", memory_bytes=ENOUGH, tail_bytes=ENOUGH) as broker:
            broker.create_topic()
            uvloop.run(produce_batches(broker.port, batch_requests(BATCH)))
            before = broker.rss_bytes()
            uvloop.run(produce_batches(broker.port, batch_requests(count)))
            broker.wait_until_sealed()
            after = broker.rss_bytes()
            if broker.metric("penstock_memory_bytes") < count * PAYLOAD_BYTES:
                raise BenchFailed("messages were put out of memory")
        row.values.append((after - before) / count - PAYLOAD_BYTES)
        row.note = f"the broker took {before / 2**20:.0f} MiB before, {after / 2**20:.0f} after"
    return [row]
