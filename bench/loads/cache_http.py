"""GET and PUT of a small cache value over HTTP, beside the bare responder and Redis GET and SET.

All take turns within a run. The cache is ephemeral, and Redis keeps no log either. There are a
thousand keys, one operation per request, and no pipelining.
"""

from __future__ import annotations

import msgspec

from bench.cores import BusyCores
from bench.generators import CONNECTIONS, KEYS, run_cache, run_get, run_set
from bench.processes import CACHE_PATH, Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "cache_http"
GET, PUT = "GET", "PUT"
REDIS_COMMAND = {GET: "GET", PUT: "SET"}
OF_BARE = {GET: 0.45, PUT: 0.4}


def measure(setting: Setting) -> list[Row]:
    rows = {PUT: _rows(PUT), GET: _rows(GET)}
    if note := setting.lacks("wrk"):
        for row in (*rows[PUT], *rows[GET]):
            row.note = note
        return [*rows[GET], *rows[PUT]]
    for _ in setting.each_run(LOAD):
        _broker(setting, rows)
        _bare(setting, rows)
        note = setting.lacks("redis-server", "redis-benchmark")
        if not note:
            _redis(setting, rows)
        for ours, bare, theirs, of_bare, of_redis in rows.values():
            of_bare.values.append(ours.values[-1] / bare.values[-1])
            if note:
                theirs.note = of_redis.note = note
            else:
                of_redis.values.append(ours.values[-1] / theirs.values[-1])
    return [*rows[GET], *rows[PUT]]


def _rows(method: str) -> list[Row]:
    command = REDIS_COMMAND[method]
    return [
        Row(LOAD, f"Penstock, {method}, {CONNECTIONS} connections", "/s", []),
        Row(LOAD, f"bare httptools responder, {method}, nothing stored", "/s", []),
        Row(LOAD, f"Redis {command}, no log, {CONNECTIONS} clients", "/s", []),
        Row(LOAD, f"Penstock : bare responder, {method}", "×", [], Target(OF_BARE[method])),
        Row(LOAD, f"Penstock : Redis, {method}", "×", []),
    ]


def _broker(setting: Setting, rows: dict[str, list[Row]]) -> None:
    """Measures PUT first, so that GET finds its keys."""
    with setting.broker("cache") as broker:
        for method, (row, *_) in rows.items():
            before = broker.cache_version()
            warm = run_cache(broker, 1, method).requests
            with BusyCores(setting.cores) as busy:
                result = run_cache(broker, setting.seconds, method)
            _check(broker, method, warm + result.requests, broker.cache_version() - before)
            row.values.append(result.rate)
            row.note = f"{busy}; p99 {result.p99_us / 1000:.1f} ms"


def _check(broker: Broker, method: str, requests: int, versions: int) -> None:
    """Allows for requests that were in progress when wrk stopped, which it did twice."""
    puts = versions - 1
    expected = requests if method == PUT else 0
    if not expected <= puts <= expected + 2 * CONNECTIONS:
        raise BenchFailed(f"wrk counted {requests} {method}s, the broker has done {puts} PUTs")
    for key in (1, KEYS):
        answer = broker.ask("GET", f"{CACHE_PATH}/key-{key}")
        if msgspec.json.decode(answer)["value"] is None:
            raise BenchFailed(f"key-{key} has no value")


def _bare(setting: Setting, rows: dict[str, list[Row]]) -> None:
    with setting.bare_responder() as responder:
        for method, (_, row, *_) in rows.items():
            run_cache(responder, 1, method)
            with BusyCores(setting.cores) as busy:
                row.values.append(run_cache(responder, setting.seconds, method).rate)
            row.note = str(busy)


def _redis(setting: Setting, rows: dict[str, list[Row]]) -> None:
    with setting.redis_server(durable=False) as server:
        for method, run in ((PUT, run_set), (GET, run_get)):
            row = rows[method][2]
            with BusyCores(setting.cores) as busy:
                row.values.append(run(server, setting.seconds))
            row.note = str(busy)
