"""Time from a publish to its arrival at the last subscriber, beside Redis pub/sub.

The next event is published when the previous one is acked and has reached all subscribers.
"""

from __future__ import annotations

from statistics import quantiles

import uvloop

from bench.fan_out import OneAtATime
from bench.lean_socket import JSON
from bench.pubsub import BrokerPubSub, PubSub
from bench.redis_pubsub import RedisPubSub
from bench.rows import Row
from bench.setting import Setting

LOAD = "latency"
FAN_OUTS = (1, 10)
PER_MILLE = {"p50": 500, "p99": 990, "p999": 999}
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    rows = {fan_out: _rows(fan_out) for fan_out in FAN_OUTS}
    for _ in setting.each_run(LOAD):
        for fan_out, (ours, theirs, ratios) in rows.items():
            with setting.broker("latency") as broker:
                _measure(setting, BrokerPubSub(broker, JSON), fan_out, ours)
            if note := setting.lacks("redis-server"):
                theirs[0].note = ratios[0].note = note
                continue
            with setting.redis_server(durable=False) as server:
                _measure(setting, RedisPubSub(server.port), fan_out, theirs)
            for our, their, ratio in zip(ours, theirs, ratios, strict=True):
                ratio.values.append(our.values[-1] / their.values[-1])
    return [row for of_fan_out in rows.values() for kind in of_fan_out for row in kind]


def _rows(fan_out: int) -> tuple[list[Row], list[Row], list[Row]]:
    to = f"to {fan_out} subscriber{'s' if fan_out > 1 else ''}"
    return (
        [Row(LOAD, f"Penstock {to}, {name}", "ms", []) for name in PER_MILLE],
        [Row(LOAD, f"Redis pub/sub {to}, {name}", "ms", []) for name in PER_MILLE],
        [Row(LOAD, f"Penstock : Redis, {to}, {name}", "×", []) for name in PER_MILLE],
    )


def _measure(setting: Setting, pubsub: PubSub, fan_out: int, rows: list[Row]) -> None:
    uvloop.run(OneAtATime(pubsub, fan_out).run(WARM_S))
    took: list[float] = uvloop.run(OneAtATime(pubsub, fan_out).run(setting.seconds))
    cuts = quantiles(took, n=1000)
    for row, per_mille in zip(rows, PER_MILLE.values(), strict=True):
        row.values.append(cuts[per_mille - 1])
    rows[0].note = f"{len(took):,} events"
