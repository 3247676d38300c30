"""Speed of produce with a million waiting messages, finished messages or idempotency keys.

Each such broker takes turns with a new one that was prepared in the same way and has only a
thousand. The measured produces have an idempotency key if the load is about keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from bench.batches import BATCH, batch_requests, consume_and_ack, produce_batches
from bench.generators import run_produce
from bench.processes import Broker
from bench.rows import Row, Target
from bench.setting import Setting

LOAD = "scale"
BACKLOG, HISTORY, KEYS = "backlog", "acked history", "idempotency keys"
DAY_MS = 24 * 3600 * 1000


def measure(setting: Setting) -> list[Row]:
    rows: list[Row] = []
    for kind in (BACKLOG, HISTORY, KEYS):
        what = f"with {setting.messages:,} {kind} : with {BATCH:,}"
        row = Row(LOAD, what, "×", [], Target(0.9), setting.lacks("wrk"))
        rows.append(row)
        if not row.note:
            _compare(setting, kind, row)
    return rows


def _compare(setting: Setting, kind: str, row: Row) -> None:
    setting.say(f"{LOAD}: preparing {setting.messages:,} {kind}")
    with _prepared(setting, "much", kind, setting.messages) as much:
        for run in setting.each_run(f"{LOAD}, {kind}"):
            with _prepared(setting, "little", kind, BATCH) as little:
                base = _rate(setting, little, kind, run)
            rate = _rate(setting, much, kind, run)
            row.values.append(rate / base)
            row.note = f"{rate:,.0f}/s against {base:,.0f}/s in the last run"


@contextmanager
def _prepared(setting: Setting, name: str, kind: str, count: int) -> Iterator[Broker]:
    broker = setting.broker(f"scale-{name}", max_in_flight=10_000, idempotency_ttl_ms=DAY_MS)
    with broker:
        broker.create_topic()
        prefix = "before-" if kind == KEYS else ""
        uvloop.run(produce_batches(broker.port, batch_requests(count, prefix)))
        if kind == HISTORY:
            uvloop.run(consume_and_ack(broker.port, count))
        broker.wait_until_sealed()
        yield broker


def _rate(setting: Setting, broker: Broker, kind: str, run: int) -> float:
    prefix = f"run-{run}-" if kind == KEYS else ""
    run_produce(broker, 1, f"warm-{prefix}" if prefix else "")
    return run_produce(broker, setting.seconds / 2, prefix).rate
