"""Batches of small events to ten subscribers, each on its own socket, beside Redis pub/sub.

Only received events count; dropped events are shown separately. The publisher has a few unacked
batches and continues as they are acked. For the broker and for Redis, subscribers and publisher
run in one process and parse only what they need for counting. Redis gets one PUBLISH per event,
pipelined per batch.
"""

from __future__ import annotations

import uvloop

from bench.cores import BusyCores
from bench.fan_out import Delivered, FanOut
from bench.lean_socket import BINARY, JSON
from bench.pubsub import BrokerPubSub, PubSub
from bench.redis_pubsub import RedisPubSub
from bench.rows import Row, Target
from bench.setting import Setting

LOAD = "fanout"
SUBSCRIBERS = 10
BATCH = 64
IN_THE_AIR = 8
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    json, binary = _rows("JSON"), _rows("binary")
    what = f"Redis pub/sub, {SUBSCRIBERS} subscribers, {BATCH} in a pipeline"
    theirs = Row(LOAD, what, "deliveries/s", [])
    for _ in setting.each_run(LOAD):
        for (ours, dropped, _), subprotocol in ((json, JSON), (binary, BINARY)):
            delivered = _broker(setting, ours, subprotocol)
            ours.values.append(delivered.rate)
            dropped.values.append(delivered.dropped_percent)
        if note := setting.lacks("redis-server"):
            theirs.note = json[-1].note = binary[-1].note = note
            continue
        theirs.values.append(_redis(setting, theirs))
        for ours, _, ratio in (json, binary):
            ratio.values.append(ours.values[-1] / theirs.values[-1])
    return [*json[:2], *binary[:2], theirs, json[-1], binary[-1]]


def _rows(encoding: str) -> list[Row]:
    what = f"Penstock, {SUBSCRIBERS} subscribers, batches of {BATCH}, {encoding}"
    return [
        Row(LOAD, what, "deliveries/s", [], Target(1_000_000)),
        Row(LOAD, f"dropped of these, {encoding}", "%", []),
        Row(LOAD, f"Penstock : Redis, {encoding}", "×", []),
    ]


def _broker(setting: Setting, row: Row, subprotocol: str) -> Delivered:
    with setting.broker("fanout") as broker:
        return _deliver(setting, row, BrokerPubSub(broker, subprotocol))


def _redis(setting: Setting, row: Row) -> float:
    with setting.redis_server(durable=False) as server:
        return _deliver(setting, row, RedisPubSub(server.port)).rate


def _deliver(setting: Setting, row: Row, pubsub: PubSub) -> Delivered:
    uvloop.run(FanOut(pubsub, SUBSCRIBERS, BATCH, IN_THE_AIR).run(WARM_S))
    with BusyCores(setting.cores) as busy:
        load = FanOut(pubsub, SUBSCRIBERS, BATCH, IN_THE_AIR)
        delivered: Delivered = uvloop.run(load.run(setting.seconds))
    row.note = f"{busy}; {delivered.arrived:,} arrived, {delivered.dropped:,} were dropped"
    return delivered
