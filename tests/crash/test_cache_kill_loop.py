"""felix-52, 78, 79, 81 and 111, with a real broker that is killed again and again under load.

Segments are small, so that rolling, sealing and snapshots happen under the kills too. When a kill
comes is random, from a seed that is printed: put it into KILL_LOOP_SEED to draw the same again.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.crash.cache_ledger import CACHES, LONG_TTL_MS, Ledger
from tests.crash.wire import Connection, Lost

SMALL = {"PENSTOCK_SEGMENT_BYTES": "65536"}
BUDGET_S = 24.0
MIN_LIVES = 6
KEYS_PER_WRITER = 12
SCOPE = {"tenant_id": "default", "namespace": "default"}
BASE = "/v1/tenants/default/namespaces/default"
TXN_KEYS = ("t0", "t1", "t2")
"""In both caches."""


class Load:
    """The clients of one life of the broker; each ends when its connection does."""

    def __init__(self, ledger: Ledger, port: int, rng: random.Random, life: int) -> None:
        self._ledger = ledger
        self._port = port
        self._rng = rng
        self._life = life

    async def run(self) -> None:
        works = [self._write(n) for n in range(3)] + [self._count() for _ in range(3)]
        await asyncio.gather(*works, self._transact())

    async def _ask(self, connection: Connection, kind: str, **members: Any) -> dict[str, Any]:
        reply = await connection.post("/v1/felix", {"type": kind, **SCOPE, **members})
        answer: dict[str, Any] = json.loads(reply.body)
        assert reply.status == 200, answer
        return answer

    async def _write(self, writer: int) -> None:
        """Puts and deletes, each made only if the key is as it was left."""
        ledger, number = self._ledger, 0
        try:
            async with Connection(self._port) as connection:
                while True:
                    number += 1
                    key = f"w{writer}-{self._rng.randrange(KEYS_PER_WRITER)}"
                    at = {"cache": "orders", "key": key, "if_version": ledger.version_of(key)}
                    if self._rng.random() < 0.2:
                        ledger.asked(key, None)
                        answer = await self._ask(connection, "cache_delete", **at)
                    else:
                        value = b"%d-%d-%d " % (self._life, writer, number)
                        value += b"x" * self._rng.choice([0, 100, 3000])
                        ttl = {"ttl_ms": LONG_TTL_MS} if self._rng.random() < 0.3 else {}
                        ledger.asked(key, value)
                        text = base64.b64encode(value).decode()
                        answer = await self._ask(connection, "cache_put", **at, value=text, **ttl)
                    ledger.told("orders", key, answer["version"])
        except Lost:
            return

    async def _count(self) -> None:
        try:
            async with Connection(self._port) as connection:
                while True:
                    self._ledger.counting()
                    answer = await self._ask(connection, "cache_incr", cache="totals", key="n")
                    self._ledger.counted(answer["number"], answer["version"])
        except Lost:
            return

    async def _transact(self) -> None:
        number = 0
        try:
            async with Connection(self._port) as connection:
                while True:
                    number += 1
                    token = b"%d-%d" % (self._life, number)
                    value = base64.b64encode(token).decode()
                    ops = [
                        {"op": "put", "cache": cache, "key": key, "value": value}
                        for key in TXN_KEYS
                        for cache in CACHES
                    ]
                    self._ledger.asked_txn(token)
                    answer = await self._ask(connection, "cache_txn", cache="orders", ops=ops)
                    self._ledger.told_txn(answer["results"])
        except Lost:
            return


class CacheKillLoop:
    """The broker's lives on one directory, and what must be true at the start of each."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self.broker = broker
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.lives = 0
        broker.start()
        for name in CACHES:
            made = broker.client.post(f"{BASE}/caches", json={"name": name, "durable": True})
            assert made.status_code == 201, made.text
        broker.kill()

    def live_and_die(self) -> None:
        self.lives += 1
        self.broker.start()
        self.check()
        life_s = self.rng.choice([0.03, 0.15, 0.4, 0.9]) * self.rng.uniform(0.5, 1.0)
        asyncio.run(self._load(life_s))

    async def _load(self, life_s: float) -> None:
        load = Load(self.ledger, self.broker.port, self.rng, self.lives)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(life_s)
        assert self.broker.is_running(), self.broker.stderr()
        self.broker.kill()
        await asyncio.wait_for(running, 30)

    def check(self) -> None:
        """Everything that is found now, against what was told."""
        ledger = self.ledger
        for key in ledger.known_keys():
            ledger.found(key, *self._get("orders", key))
        count, _ = self._get("totals", "n")
        ledger.found_count(int(count or b"0"))
        ledger.found_txn([self._get(cache, key)[0] for key in TXN_KEYS for cache in CACHES])
        for cache in CACHES:
            ledger.found_version(cache, self._next_version(cache) - 1)
        log = self.broker.stderr()
        assert "Traceback" not in log, log[-5000:]
        violations = ledger.violations
        assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations[:20])

    def _get(self, cache: str, key: str) -> tuple[bytes | None, int]:
        found = self.broker.client.get(f"{BASE}/caches/{cache}/entries/{key}").json()
        assert 0 < found.get("ttl_ms", LONG_TTL_MS) <= LONG_TTL_MS, found
        value = found["value"]
        return None if value is None else base64.b64decode(value), found["version"]

    def _next_version(self, cache: str) -> int:
        path = f"{BASE}/caches/{cache}/entries/probe"
        return int(self.broker.client.put(path, json={"value": ""}).json()["version"])


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[CacheKillLoop]:
    """The data directory is kept when the test fails."""
    seed = int(os.environ.get("KILL_LOOP_SEED") or secrets.randbits(32))
    print(f"KILL_LOOP_SEED={seed}")
    broker = BrokerProcess(tmp_path / "data", env=SMALL)
    try:
        yield CacheKillLoop(broker, seed)
    finally:
        broker.close()
    shutil.rmtree(tmp_path / "data")


def test_kills_under_load_lose_nothing_that_a_durable_cache_acknowledged(
    loop: CacheKillLoop,
) -> None:
    """felix-52, 78, 79, 81, 111"""
    began = time.monotonic()
    while loop.lives < MIN_LIVES or time.monotonic() - began < BUDGET_S:
        loop.live_and_die()
    loop.broker.start()
    loop.check()
    loop.broker.wait_for_seal()
    assert loop.broker.terminate() == 0, loop.broker.stderr()
    print(loop.lives, dict(loop.ledger.counts))
    rare = [what for what in KINDS if not loop.ledger.counts[what]]
    assert not rare, f"the load never led to: {rare}"


KINDS = ("written", "removed", "counted", "transactions")
