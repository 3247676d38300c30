"""Produce, consume and ack with 64 messages in progress, durable, beside Redis Streams.

Single acks (pipelined) are compared with an XACK per message, and batches of acks with one XACK
for all messages that arrived. The broker gets the lean client of this directory, Redis its Python
client.
"""

from __future__ import annotations

import msgspec
import uvloop

from bench.broker_cycle import BrokerCycle
from bench.cores import BusyCores
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
