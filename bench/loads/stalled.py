"""Effect of a subscriber that does not read on publishers and nine healthy subscribers.

Turns with and without it alternate, four times per run, and the times of all turns are combined.
The buffer of the stalled subscriber is full before its turns begin, and the broker keeps dropping
events for it.
"""

from __future__ import annotations

from statistics import quantiles

import uvloop

from bench.lean_socket import JSON
from bench.paced_publish import PacedPublish
from bench.processes import Broker
from bench.pubsub import BrokerPubSub
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting
from bench.stalled_subscriber import stalled_subscriber

LOAD = "stalled"
HEALTHY = 9
PER_SECOND = 1000
TURNS = 4
WARM_S = 0.5


def measure(setting: Setting) -> list[Row]:
    p99 = f"publish p99 at {PER_SECOND:,}/s, {HEALTHY} subscribers"
    alone = Row(LOAD, f"{p99}, alone", "ms", [])
    beside = Row(LOAD, f"{p99}, beside a stalled one", "ms", [])
    ratio = Row(LOAD, "beside : alone", "×", [], Target(1.2, at_most=True))
    lost = Row(LOAD, f"lost by the {HEALTHY} beside it", "events", [], Target(0, at_most=True))
    for _ in setting.each_run(LOAD):
        with setting.broker("stalled") as broker:
            took_alone, took_beside = _turns(setting, broker, lost, beside)
        alone.values.append(_p99(took_alone))
        beside.values.append(_p99(took_beside))
        ratio.values.append(beside.values[-1] / alone.values[-1])
    return [alone, beside, ratio, lost]


def _turns(
    setting: Setting, broker: Broker, lost: Row, beside: Row
) -> tuple[list[float], list[float]]:
    """Returns the times without the stalled subscriber, and with it."""
    _publish(broker, WARM_S)
    took_alone: list[float] = []
    took_beside: list[float] = []
    missing = 0
    for _ in range(TURNS):
        load = _publish(broker, setting.seconds / TURNS)
        if load.lost:
            raise BenchFailed(f"{load.lost} events were lost with nobody stalled")
        took_alone += load.took
        with stalled_subscriber(broker) as stalled:
            before = stalled.report().dropped
            load = _publish(broker, setting.seconds / TURNS)
            dropped = stalled.report().dropped - before
        if not dropped:
            raise BenchFailed("the stalled subscriber was not stalled: it lost nothing")
        took_beside += load.took
        missing += load.lost
        beside.note = f"the stalled one lost {dropped:,} of {len(load.took):,} in its last turn"
    lost.values.append(missing)
    return took_alone, took_beside


def _publish(broker: Broker, seconds: float) -> PacedPublish:
    load = PacedPublish(BrokerPubSub(broker, JSON), HEALTHY, PER_SECOND)
    uvloop.run(load.run(seconds))
    return load


def _p99(took: list[float]) -> float:
    return quantiles(took, n=100)[98]
