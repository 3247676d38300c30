"""Produce rate and p99 of a tenant, alone, beside one that sends ten times its quota, and beside
one whose reads are all accepted.

Turns alternate, four times per run, and the times of all turns are combined. Each of the other
tenants is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, quantiles

import msgspec
import uvloop

from bench.lean_client import Asking, post
from bench.noisy_reader import ENTRY, READER, filling
from bench.noisy_tenant import NOISY, OVERDRAFT, QUOTA, produce_request
from bench.paced_produce import PacedProduce
from bench.processes import ROOT, TOPIC, Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting
from penstock.model.limits import MAX_BATCH_ITEMS

LOAD = "tenants"
QUIET = "quiet"
PER_SECOND = 2000
TURNS = 4
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    what = f"produce at {PER_SECOND:,}/s"
    beside = f"beside {OVERDRAFT} times another's quota"
    which = (f"{what}, alone", beside, "beside another's reads, which no quota limits")
    rates = [Row(LOAD, f"rate, {each}", "/s", []) for each in which]
    p99s = [Row(LOAD, f"p99, {each}", "ms", []) for each in which]
    of_rate = Row(LOAD, "rate alone : beside", "×", [], Target(1.2, at_most=True))
    of_p99 = Row(LOAD, "p99 beside : alone", "×", [], Target(1.2, at_most=True))
    for _ in setting.each_run(LOAD):
        with setting.broker(LOAD) as broker:
            _create_tenants(broker)
            turns = _turns(setting, broker, p99s)
        for loads, rate, p99 in zip(turns, rates, p99s, strict=True):
            rate.values.append(mean(load.rate for load in loads))
            took = [each for load in loads for each in load.took]
            p99.values.append(quantiles(took, n=100)[98])
        of_rate.values.append(rates[0].values[-1] / rates[1].values[-1])
        of_p99.values.append(p99s[1].values[-1] / p99s[0].values[-1])
    return [*rates, of_rate, *p99s, of_p99]


def _create_tenants(broker: Broker) -> None:
    names = (QUIET, NOISY, READER)
    wanted = {
        "tenants": [{"tenant_id": each, "namespaces": ["default"]} for each in names],
        "topics": [{"tenant_id": each, "name": TOPIC} for each in names],
        "caches": [{"tenant_id": READER, "name": "bench"}],
        "quotas": [{"tenant_id": NOISY, "publish_rate_limit": QUOTA}],
    }
    broker.ask("POST", "/v1/apply", wanted)
    broker.ask("PUT", ENTRY, {"value": "dg=="})
    messages = filling()
    for first in range(0, len(messages), MAX_BATCH_ITEMS):
        uvloop.run(_fill(broker.port, messages[first : first + MAX_BATCH_ITEMS]))


async def _fill(port: int, messages: list[dict[str, str]]) -> None:
    body = msgspec.json.encode(messages)
    connection = await Asking().connect(port)
    await connection.ask(post("/v1/produce/batch", body, f"X-Penstock-Tenant: {READER}"))
    connection.close()


def _turns(setting: Setting, broker: Broker, noted: list[Row]) -> list[list[PacedProduce]]:
    """Returns the turns without another tenant, beside one at its limit, and beside reads."""
    seconds = setting.seconds / TURNS
    alone: list[PacedProduce] = []
    by_noise: list[PacedProduce] = []
    by_reads: list[PacedProduce] = []
    _produce(broker, WARM_S)
    for _ in range(TURNS):
        alone.append(_produce(broker, seconds))
        load, rise, took = _beside(broker, seconds, "noisy_tenant", _refused)
        by_noise.append(load)
        refused = rise / took
        if refused < (OVERDRAFT - 1) * QUOTA * 0.8:
            raise BenchFailed(f"only {refused:.0f} produces a second were refused")
        noted[1].note = f"{refused:,.0f} produces of the other were refused a second"
        load, rise, took = _beside(broker, seconds, "noisy_reader", _requests)
        by_reads.append(load)
        reads = (rise - len(load.took)) / took
        noted[2].note = f"{reads:,.0f} reads of the other were answered a second"
    return [alone, by_noise, by_reads]


def _beside(
    broker: Broker, seconds: float, module: str, count: Callable[[Broker], float]
) -> tuple[PacedProduce, float, float]:
    """Produces beside another tenant. Returns what was measured, how much `count` rose meanwhile,
    and how many seconds that took."""
    idle = count(broker)
    with _other_tenant(broker, module, lambda: count(broker) > idle):
        before, began = count(broker), time.perf_counter()
        load = _produce(broker, seconds)
        return load, count(broker) - before, time.perf_counter() - began


def _produce(broker: Broker, seconds: float) -> PacedProduce:
    load = PacedProduce(PER_SECOND, produce_request(QUIET))
    uvloop.run(load.run(broker.port, seconds))
    return load


@contextmanager
def _other_tenant(broker: Broker, module: str, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Runs the other tenant while the block runs; it has begun when the block begins, and goes on
    to its end."""
    command = [sys.executable, "-m", f"bench.{module}", str(broker.port)]
    other = subprocess.Popen(command, cwd=ROOT)
    try:
        while not has_begun():
            if other.poll() is not None:
                raise BenchFailed("the other tenant ended")
            time.sleep(0.05)
        yield
        if other.poll() is not None:
            raise BenchFailed("the other tenant ended")
    finally:
        other.kill()
        other.wait()


def _requests(broker: Broker) -> float:
    return broker.metric("penstock_requests_total")


def _refused(broker: Broker) -> int:
    report = msgspec.json.decode(broker.ask("GET", f"/v1/tenants/{NOISY}/quota"))
    return int(report["refused"].get("publish_rate_limit", 0))
