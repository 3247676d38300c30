"""Produce and cache GET with access control, beside the same without it.

Two brokers run, one of each kind, and take turns. The one with access control has a token of the
broker for the load, whose principal may produce and read by two rules among a hundred of others.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec

from bench.cores import BusyCores
from bench.generators import CONNECTIONS, run_cache, run_produce
from bench.processes import Broker
from bench.rows import Row, Target
from bench.setting import Setting

LOAD = "access"
ADMIN = "the-token-of-the-benchmark"
RULES = 100
TURNS = 2


def measure(setting: Setting) -> list[Row]:
    kinds = {kind: _rows(kind) for kind in ("produce", "cache GET")}
    rows = [row for each in kinds.values() for row in each]
    if note := setting.lacks("wrk"):
        for row in rows:
            row.note = note
        return rows
    for _ in setting.each_run(LOAD):
        with ExitStack() as stack:
            off = stack.enter_context(setting.broker("access-off"))
            on = stack.enter_context(
                setting.broker("access-on", access_control="true", token=ADMIN)
            )
            brokers = (off, ""), (on, _create_rules(on))
            for broker, token in brokers:
                broker.create_topic()
                run_cache(broker, 1, "PUT", ADMIN if token else "")
            for kind, (of_off, of_on, ratio) in kinds.items():
                for row, (broker, token) in zip((of_off, of_on), brokers, strict=True):
                    _rate(broker, kind, 1, token)
                    row.values.append(0)
                for _ in range(TURNS):
                    for row, (broker, token) in zip((of_off, of_on), brokers, strict=True):
                        with BusyCores(setting.cores) as busy:
                            rate = _rate(broker, kind, setting.seconds / TURNS, token)
                        row.values[-1] += rate / TURNS
                        row.note = str(busy)
                ratio.values.append(of_on.values[-1] / of_off.values[-1])
    return rows


def _rows(kind: str) -> list[Row]:
    how = f"{kind}, {CONNECTIONS} connections"
    return [
        Row(LOAD, f"{how}, without access control", "/s", []),
        Row(LOAD, f"{how}, with access control", "/s", []),
        Row(LOAD, f"with : without, {kind}", "×", [], Target(0.9)),
    ]


def _create_rules(broker: Broker) -> str:
    """Returns the token of the load."""
    for number in range(RULES):
        _grant(broker, f"principal-{number % 10}", "produce", f"topic:other-{number}")
    _grant(broker, "load", "produce", "topic:*")
    _grant(broker, "load", "cache_read", "cache:*")
    created = broker.ask("POST", "/v1/tokens", {"principal": "load"})
    return str(msgspec.json.decode(created)["token"])


def _grant(broker: Broker, principal: str, permission: str, resource: str) -> None:
    rule = {
        "tenant_id": "default",
        "principal": principal,
        "permissions": [permission],
        "resource": resource,
    }
    broker.ask("POST", "/v1/access/rules", rule)


def _rate(broker: Broker, kind: str, seconds: float, token: str) -> float:
    if kind == "produce":
        return run_produce(broker, seconds, token=token).rate
    return run_cache(broker, seconds, "GET", token).rate
