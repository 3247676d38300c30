"""The load generators written in C: wrk and redis-benchmark, run on the load's core."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.processes import CACHE_PATH, TOPIC, Broker, RedisServer, Server
from bench.rows import BenchFailed

CONNECTIONS = 64
VALUE_BYTES = 100
KEYS = 1000
_PRODUCE_SCRIPT = Path(__file__).with_name("produce.lua")
_CACHE_SCRIPT = Path(__file__).with_name("cache.lua")
_REDIS_KEY = "key:__rand_int__"
_CALIBRATION = 10_000


class WrkResult(msgspec.Struct, frozen=True):
    requests: int
    duration_us: int
    bad_statuses: int
    socket_errors: int
    p99_us: int

    @property
    def rate(self) -> float:
        return self.requests / self.duration_us * 1e6


def missing_tools() -> list[str]:
    return [tool for tool in ("wrk", "redis-server", "redis-benchmark") if not shutil.which(tool)]


def run_wrk(server: Server, seconds: float, key_prefix: str = "", token: str = "") -> WrkResult:
    """Sends durable produces, one per request."""
    arguments = [TOPIC, key_prefix] if key_prefix else [TOPIC]
    return _wrk(server, seconds, "/v1/produce", _PRODUCE_SCRIPT, arguments, token)


def run_cache(server: Server, seconds: float, method: str, token: str = "") -> WrkResult:
    """Sends a GET or PUT of a cache entry per request, over a thousand keys."""
    return _wrk(server, seconds, CACHE_PATH, _CACHE_SCRIPT, [method], token)


def _wrk(
    server: Server, seconds: float, path: str, script: Path, arguments: list[str], token: str
) -> WrkResult:
    """Runs wrk. Any answer that is not a success fails the benchmark."""
    headers = ["--header", f"Authorization: Bearer {token}"] if token else []
    command = [
        "wrk", "--threads", "1", "--connections", str(CONNECTIONS), *headers,
        "--duration", f"{max(1, round(seconds))}s", "--script", str(script),
        f"http://127.0.0.1:{server.port}{path}", "--", *arguments,
    ]  # fmt: skip
    output = _run(command)
    line = next((line for line in output.splitlines() if line.startswith("{")), "")
    if not line:
        raise BenchFailed(f"wrk said nothing of its results:\n{output}")
    result = msgspec.json.decode(line, type=WrkResult)
    if result.bad_statuses or result.socket_errors or not result.requests:
        raise BenchFailed(f"not every request succeeded: {result}")
    return result


def run_produce(broker: Broker, seconds: float, key_prefix: str = "", token: str = "") -> WrkResult:
    """Runs `run_wrk` and compares its count with the messages that the broker stored."""
    before = broker.stored()
    result = run_wrk(broker, seconds, key_prefix, token)
    stored = broker.stored() - before
    # Requests in progress when wrk stopped are stored but not counted.
    if not result.requests <= stored <= result.requests + CONNECTIONS:
        raise BenchFailed(f"wrk counted {result.requests} produces, the broker stored {stored}")
    return result


def run_xadd(server: RedisServer, seconds: float) -> float:
    """Returns XADDs per second."""
    return _redis_benchmark(server, seconds, "XADD", TOPIC, "*", "value", "v" * VALUE_BYTES)


def run_set(server: RedisServer, seconds: float) -> float:
    """Returns SETs per second, over a thousand keys."""
    return _redis_benchmark(server, seconds, "SET", _REDIS_KEY, "v" * VALUE_BYTES)


def run_get(server: RedisServer, seconds: float) -> float:
    """Returns GETs per second, of the keys that `run_set` has set."""
    return _redis_benchmark(server, seconds, "GET", _REDIS_KEY)


def _redis_benchmark(server: RedisServer, seconds: float, *command: str) -> float:
    """Runs for about `seconds`: redis-benchmark takes a number of requests, not a time."""
    rate = _redis_times(server, _CALIBRATION, command)
    return _redis_times(server, max(_CALIBRATION, int(rate * seconds)), command)


def _redis_times(server: RedisServer, count: int, command: Sequence[str]) -> float:
    benchmark = [
        "redis-benchmark", "-p", str(server.port), "-c", str(CONNECTIONS), "-n", str(count),
        "-r", str(KEYS), "--csv", *command,
    ]  # fmt: skip
    before = _redis_calls(server, command[0])
    rows = list(csv.reader(_run(benchmark).splitlines()))
    calls = _redis_calls(server, command[0]) - before
    # redis-benchmark may send a few more requests than it counts.
    if not count <= calls <= count + CONNECTIONS:
        raise BenchFailed(f"{count} {command[0]}s were asked for, Redis has done {calls}")
    return float(rows[-1][1])


def _redis_calls(server: RedisServer, command: str) -> int:
    """Returns how often Redis carried out the command without an error."""
    stats = _run(["redis-cli", "-p", str(server.port), "INFO", "commandstats"])
    found = re.search(rf"^cmdstat_{command.lower()}:(.*)$", stats, re.MULTILINE)
    if found is None:
        return 0
    counts = dict(part.split("=") for part in found[1].strip().split(","))
    return int(counts["calls"]) - int(counts["failed_calls"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"{command[0]} failed: {done.stderr or done.stdout}")
    return done.stdout
