"""cache_get and cache_put over one WebSocket, with 1 and 64 per frame and several open frames."""

from __future__ import annotations

import uvloop

from bench.cache_operations import GET, PUT, CacheOperations
from bench.cores import BusyCores
from bench.processes import Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "cache_socket"
SINGLE, MANY = 1, 64
IN_THE_AIR = {SINGLE: 64, MANY: 4}
TARGETS = {SINGLE: Target(10_000), MANY: Target(80_000)}
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    rows = {(op, per_frame): _row(op, per_frame) for per_frame in TARGETS for op in (PUT, GET)}
    for _ in setting.each_run(LOAD):
        with setting.broker("cache") as broker:
            for (operation, per_frame), row in rows.items():
                row.values.append(_rate(setting, broker, row, operation, per_frame))
    return list(rows.values())


def _row(operation: str, per_frame: int) -> Row:
    how = "one a frame" if per_frame == SINGLE else f"{per_frame} a frame"
    what = f"{operation}, {how}, {IN_THE_AIR[per_frame]} frames in the air"
    return Row(LOAD, what, "operations/s", [], TARGETS[per_frame])


def _rate(setting: Setting, broker: Broker, row: Row, operation: str, per_frame: int) -> float:
    before = broker.cache_version()
    warm = CacheOperations(operation, per_frame, IN_THE_AIR[per_frame])
    uvloop.run(warm.run(broker.port, WARM_S))
    load = CacheOperations(operation, per_frame, IN_THE_AIR[per_frame])
    with BusyCores(setting.cores) as busy:
        rate: float = uvloop.run(load.run(broker.port, setting.seconds))
    row.note = str(busy)
    puts = broker.cache_version() - before - 1
    if puts != (warm.done + load.done if operation == PUT else 0):
        raise BenchFailed(f"{warm.done + load.done} {operation}s were answered, {puts} were puts")
    return rate
