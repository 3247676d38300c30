"""Duration of a start: records replayed per second, and whether snapshots make it independent
of the length of the history.

The time runs from the start of the process to the first answer that the broker is ready. The
replay rate does not include the time that a nearly empty broker needs.
"""

from __future__ import annotations

import time

import uvloop

from bench.batches import BATCH, batch_requests, consume_and_ack, produce_batches
from bench.processes import Broker
from bench.rows import Row, Target
from bench.setting import Setting
from penstock.storage.offline import SegmentSummary, inspect
from penstock.storage.vfs import Vfs

LOAD = "restart"
ONE_SEGMENT = 512 << 20
"""Large, so that nothing is sealed."""
MORE = 3


def measure(setting: Setting) -> list[Row]:
    return [*_replay(setting), *_snapshot(setting)]


def _replay(setting: Setting) -> list[Row]:
    what = f"replay of {setting.messages:,} messages and their acks, no snapshot"
    row = Row(LOAD, what, "records/s", [], Target(250_000))
    setting.say(f"{LOAD}: preparing {setting.messages:,} messages and acks")
    little = _stopped(setting, "little", BATCH, segment_bytes=ONE_SEGMENT)
    much = _stopped(setting, "much", setting.messages, segment_bytes=ONE_SEGMENT)
    records = _records(much) - _records(little)
    for _ in setting.each_run(f"{LOAD}, replay"):
        base, took = _time_to_ready(little), _time_to_ready(much)
        row.values.append(records / (took - base))
        row.note = f"{records:,} records; ready after {took:.2f} s, nearly empty {base:.2f} s"
    return [row]


def _snapshot(setting: Setting) -> list[Row]:
    counts = [BATCH, setting.messages, MORE * setting.messages]
    brokers = []
    for count in counts:
        setting.say(f"{LOAD}: preparing {count:,} messages of history")
        brokers.append(_stopped(setting, f"sealed-{count}", count, seal=True))
    what = "ready from a snapshot, {:,} messages of history"
    rows = [Row(LOAD, what.format(count), "s", []) for count in counts]
    ratio = Row(LOAD, f"{MORE} times the history : once", "×", [], Target(1.1, at_most=True))
    for _ in setting.each_run(f"{LOAD}, snapshot"):
        for row, broker in zip(rows, brokers, strict=True):
            row.values.append(_time_to_ready(broker))
        ratio.values.append(rows[-1].values[-1] / rows[-2].values[-1])
    return [*rows, ratio]


def _stopped(
    setting: Setting, name: str, count: int, *, seal: bool = False, **settings: int
) -> Broker:
    """Returns a stopped broker with `count` messages produced and acked."""
    broker = setting.broker(f"restart-{name}", max_in_flight=10_000, **settings)
    broker.start()
    try:
        broker.create_topic()
        uvloop.run(produce_batches(broker.port, batch_requests(count)))
        uvloop.run(consume_and_ack(broker.port, count))
        if seal:
            broker.seal_everything()
    finally:
        broker.stop()
    return broker


def _time_to_ready(broker: Broker) -> float:
    began = time.perf_counter()
    broker.start()
    try:
        return time.perf_counter() - began
    finally:
        broker.stop()


def _records(broker: Broker) -> int:
    summaries = inspect(Vfs(), str(broker.data))
    return sum(s.records for s in summaries if isinstance(s, SegmentSummary))
