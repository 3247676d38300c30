"""The load generators written in C: wrk and redis-benchmark, run on the load's core."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import msgspec

from bench.processes import TOPIC, Broker, RedisServer, Server
from bench.rows import BenchFailed

CONNECTIONS = 64
VALUE_BYTES = 100
_SCRIPT = Path(__file__).with_name("produce.lua")
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


def run_wrk(server: Server, seconds: float, key_prefix: str = "") -> WrkResult:
    """Durable produces, one a request; anything but success fails the bench."""
    command = [
        "wrk", "--threads", "1", "--connections", str(CONNECTIONS),
        "--duration", f"{max(1, round(seconds))}s", "--script", str(_SCRIPT),
        f"http://127.0.0.1:{server.port}/v1/produce", "--", TOPIC,
    ]  # fmt: skip
    output = _run([*command, key_prefix] if key_prefix else command)
    line = next((line for line in output.splitlines() if line.startswith("{")), "")
    if not line:
        raise BenchFailed(f"wrk said nothing of its results:\n{output}")
    result = msgspec.json.decode(line, type=WrkResult)
    if result.bad_statuses or result.socket_errors or not result.requests:
        raise BenchFailed(f"not every produce succeeded: {result}")
    return result


def run_produce(broker: Broker, seconds: float, key_prefix: str = "") -> WrkResult:
    """`run_wrk`, with what it counted held against what the broker has stored."""
    before = broker.stored()
    result = run_wrk(broker, seconds, key_prefix)
    stored = broker.stored() - before
    # What was under way when wrk stopped is stored and not counted.
    if not result.requests <= stored <= result.requests + CONNECTIONS:
        raise BenchFailed(f"wrk counted {result.requests} produces, the broker stored {stored}")
    return result


def run_xadd(server: RedisServer, seconds: float) -> float:
    """XADDs a second, for about `seconds`: redis-benchmark takes a number, not a time."""
    rate = _xadd(server, _CALIBRATION)
    return _xadd(server, max(_CALIBRATION, int(rate * seconds)))


def _xadd(server: RedisServer, count: int) -> float:
    command = [
        "redis-benchmark", "-p", str(server.port), "-c", str(CONNECTIONS), "-n", str(count),
        "--csv", "XADD", TOPIC, "*", "value", "v" * VALUE_BYTES,
    ]  # fmt: skip
    before = _stream_length(server)
    rows = list(csv.reader(_run(command).splitlines()))
    added = _stream_length(server) - before
    # It may send a few more than asked for, and counts only what it asked for.
    if not count <= added <= count + CONNECTIONS:
        raise BenchFailed(f"{count} XADDs were asked for, {added} are in the stream")
    return float(rows[-1][1])


def _stream_length(server: RedisServer) -> int:
    return int(_run(["redis-cli", "-p", str(server.port), "XLEN", TOPIC]))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchFailed(f"{command[0]} failed: {done.stderr or done.stdout}")
    return done.stdout
