"""Produce rate and p99 of a tenant, alone and beside one that sends ten times its quota.

Turns with and without the other tenant alternate, four times per run, and the times of all turns
are combined. The other tenant is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, quantiles

import msgspec
import uvloop

from bench.noisy_tenant import NOISY, OVERDRAFT, QUOTA, produce_request
from bench.paced_produce import PacedProduce
from bench.processes import ROOT, TOPIC, Broker
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

LOAD = "tenants"
QUIET = "quiet"
PER_SECOND = 2000
TURNS = 4
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    what = f"produce at {PER_SECOND:,}/s"
    beside = f"beside {OVERDRAFT} times another's quota"
    rates = [Row(LOAD, f"rate, {what}, alone", "/s", []), Row(LOAD, f"rate, {beside}", "/s", [])]
    p99s = [Row(LOAD, f"p99, {what}, alone", "ms", []), Row(LOAD, f"p99, {beside}", "ms", [])]
    of_rate = Row(LOAD, "rate alone : beside", "×", [], Target(1.2, at_most=True))
    of_p99 = Row(LOAD, "p99 beside : alone", "×", [], Target(1.2, at_most=True))
    for _ in setting.each_run(LOAD):
        with setting.broker(LOAD) as broker:
            _create_tenants(broker)
            alone, by_noise = _turns(setting, broker, p99s[1])
        for loads, rate, p99 in zip((alone, by_noise), rates, p99s, strict=True):
            rate.values.append(mean(load.rate for load in loads))
            took = [each for load in loads for each in load.took]
            p99.values.append(quantiles(took, n=100)[98])
        of_rate.values.append(rates[0].values[-1] / rates[1].values[-1])
        of_p99.values.append(p99s[1].values[-1] / p99s[0].values[-1])
    return [*rates, of_rate, *p99s, of_p99]


def _create_tenants(broker: Broker) -> None:
    tenants = [{"tenant_id": each, "namespaces": ["default"]} for each in (QUIET, NOISY)]
    wanted = {
        "tenants": tenants,
        "topics": [{"tenant_id": each, "name": TOPIC} for each in (QUIET, NOISY)],
        "quotas": [{"tenant_id": NOISY, "publish_rate_limit": QUOTA}],
    }
    broker.ask("POST", "/v1/apply", wanted)


def _turns(
    setting: Setting, broker: Broker, noted: Row
) -> tuple[list[PacedProduce], list[PacedProduce]]:
    """Returns the turns without the other tenant, and with it."""
    seconds = setting.seconds / TURNS
    alone, by_noise = [], []
    _produce(broker, WARM_S)
    for _ in range(TURNS):
        alone.append(_produce(broker, seconds))
        before = _refused(broker), time.perf_counter()
        with _noisy_tenant(broker):
            by_noise.append(_produce(broker, seconds))
        per_second = (_refused(broker) - before[0]) / (time.perf_counter() - before[1])
        if per_second < (OVERDRAFT - 1) * QUOTA * 0.8:
            raise BenchFailed(f"only {per_second:.0f} produces a second were refused")
        noted.note = f"{per_second:,.0f} produces of the other were refused a second"
    return alone, by_noise


def _produce(broker: Broker, seconds: float) -> PacedProduce:
    load = PacedProduce(PER_SECOND, produce_request(QUIET))
    uvloop.run(load.run(broker.port, seconds))
    return load


@contextmanager
def _noisy_tenant(broker: Broker) -> Iterator[None]:
    """Runs the other tenant while the block runs; it is at its limit when the block begins."""
    before = _refused(broker)
    command = [sys.executable, "-m", "bench.noisy_tenant", str(broker.port)]
    noisy = subprocess.Popen(command, cwd=ROOT)
    try:
        while _refused(broker) == before:
            if noisy.poll() is not None:
                raise BenchFailed("the noisy tenant ended")
            time.sleep(0.05)
        yield
    finally:
        noisy.kill()
        noisy.wait()


def _refused(broker: Broker) -> int:
    report = msgspec.json.decode(broker.ask("GET", f"/v1/tenants/{NOISY}/quota"))
    return int(report["refused"].get("publish_rate_limit", 0))
