"""Durable produce, one message per request, beside the bare responder and Redis XADD.

The three take turns within a run, so that other activity of the machine affects all of them. The
broker's turn is the longest, so that the figure includes sealing its log on the same core.
"""

from __future__ import annotations

from bench.cores import BusyCores
from bench.generators import CONNECTIONS, run_produce, run_wrk, run_xadd
from bench.rows import Row, Target
from bench.setting import Setting

LOAD = "produce"
BROKER_TURN = 3


def measure(setting: Setting) -> list[Row]:
    rows = _rows()
    broker_rate, bare_rate, redis_rate, of_redis, of_bare = rows
    if note := setting.lacks("wrk"):
        for row in rows:
            row.note = note
        return rows
    for _ in setting.each_run(LOAD):
        broker_rate.values.append(_broker(setting, broker_rate))
        bare_rate.values.append(_bare(setting, bare_rate))
        of_bare.values.append(broker_rate.values[-1] / bare_rate.values[-1])
        if note := setting.lacks("redis-server", "redis-benchmark"):
            redis_rate.note = of_redis.note = note
            continue
        redis_rate.values.append(_redis(setting, redis_rate))
        of_redis.values.append(broker_rate.values[-1] / redis_rate.values[-1])
    return rows


def _rows() -> list[Row]:
    return [
        Row(LOAD, f"Penstock, {CONNECTIONS} connections, one a request", "/s", []),
        Row(LOAD, "bare httptools responder, nothing stored", "/s", []),
        Row(LOAD, "Redis XADD, appendfsync always, 64 clients", "/s", []),
        Row(LOAD, "Penstock : Redis", "×", [], Target(0.7)),
        Row(LOAD, "Penstock : bare responder", "×", [], Target(0.35)),
    ]


def _broker(setting: Setting, row: Row) -> float:
    with setting.broker("produce") as broker:
        broker.create_topic()
        run_produce(broker, 1)
        with BusyCores(setting.cores) as busy:
            result = run_produce(broker, BROKER_TURN * setting.seconds)
    row.note = f"{busy}; p99 {result.p99_us / 1000:.1f} ms"
    return result.rate


def _bare(setting: Setting, row: Row) -> float:
    with setting.bare_responder() as responder:
        run_wrk(responder, 1)
        with BusyCores(setting.cores) as busy:
            rate = run_wrk(responder, setting.seconds).rate
    row.note = str(busy)
    return rate


def _redis(setting: Setting, row: Row) -> float:
    with setting.redis_server() as server, BusyCores(setting.cores) as busy:
        rate = run_xadd(server, setting.seconds)
    row.note = str(busy)
    return rate
