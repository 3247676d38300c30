"""driftq-17, 27, 30, 39, 46 and 57, with a real broker that is killed again and again under load.

The data directory is one; segments and memory are small, so that rolling, sealing, snapshots and
paging happen under the kills too. When a kill comes is random, from a seed that is printed: put
it into KILL_LOOP_SEED to draw the same kills and messages again. A killed process says nothing
about unsynced bytes, which the kernel keeps: the storage tests take those away.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import STOP_TIMEOUT_S, BrokerProcess, RunningBroker, eventually
from tests.crash.ledger import PARTITIONS, TOPIC, Item, Ledger
from tests.crash.load import GROUPS, Consumer, Producer, read_all, repeat_acks, until_lost

SMALL = {"PENSTOCK_SEGMENT_BYTES": "65536", "PENSTOCK_MEMORY_BYTES": "1048576"}
DEAD_LETTERS = f"dlq.{TOPIC}"
SHORT_LIFE_S = (0.02, 0.4)
LONG_LIFE_S = (0.4, 1.6)
"""Long enough for a sealing process to start, so that kills meet it at work and when it is done."""
PATIENCE_S = 120.0


class StartKilled(BrokerProcess):
    """A broker that can be killed before it says where it listens."""

    dies_after_s: float | None = None

    def _wait_for_address(self, process: RunningBroker) -> int:
        if self.dies_after_s is None:
            return super()._wait_for_address(process)
        time.sleep(self.dies_after_s)
        process.kill()
        process.wait(STOP_TIMEOUT_S)
        return 0


class KillLoop:
    """The broker's lives on one directory, and what must be true after each."""

    def __init__(self, broker: StartKilled, seed: int) -> None:
        self.broker = broker
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.start_s = 0.0
        broker.start().create_topic(TOPIC, PARTITIONS)
        self._kill()

    def live_and_die(self) -> None:
        """A start, a random while under load, SIGKILL."""
        self._start()
        life_s = self.rng.uniform(*(LONG_LIFE_S if self.rng.random() < 0.2 else SHORT_LIFE_S))
        asyncio.run(self._load(life_s))
        self._check()

    def die_starting(self) -> None:
        """SIGKILL before the start is over, or just after: at most as long as the last one took."""
        self.broker.dies_after_s = self.start_s * self.rng.uniform(0.05, 1.1)
        self.broker.start()
        self.broker.dies_after_s = None
        self._kill()

    def finish(self) -> None:
        """A last start: the groups are drained, a new one reads everything, all is checked."""
        self._start()
        asyncio.run(self._drain())
        stored = self._read_all(TOPIC)
        for item in stored:
            self.ledger.delivered("audit", item)
        self.ledger.check_stored(stored)
        topics = self.broker.client.get("/v1/topics").json()["topics"]
        letters = self._read_all(DEAD_LETTERS) if DEAD_LETTERS in topics else []
        for group in GROUPS:
            own = [item for item in letters if item["envelope"]["dlq"]["group"] == group]
            self.ledger.check_finished(group, own)
        self.ledger.counts["dead letters"] = len(letters)
        self._check()
        self._check_topic()

    def stop(self) -> None:
        assert self.broker.terminate(PATIENCE_S) == 0, self.broker.stderr()

    # -- inside -------------------------------------------------------------------------------

    def _start(self) -> None:
        self.ledger.round += 1
        began = time.monotonic()
        self.broker.start()
        self.start_s = time.monotonic() - began
        self._check_topic()

    def _kill(self) -> None:
        self.broker.kill()
        self._check()

    def _check(self) -> None:
        log = self.broker.stderr()
        assert "Traceback" not in log, log[-5000:]
        violations = self.ledger.violations
        assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations[:20])

    def _check_topic(self) -> None:
        self.ledger.check_topic(self._describe(TOPIC), GROUPS)
        self._check()

    def _describe(self, topic: str) -> dict[str, Any]:
        reply = self.broker.client.get(f"/v1/topics/{topic}")
        assert reply.status_code == 200, reply.text
        described: dict[str, Any] = reply.json()
        return described

    async def _load(self, life_s: float) -> None:
        ledger, port, life = self.ledger, self.broker.port, f"life{self.ledger.round}"
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for n in range(5):
                producer = Producer(ledger, port, f"{life}-writer{n}", self._new_rng())
                tasks.create_task(until_lost(producer.run(in_batches=n < 2)))
            for n, group in enumerate(GROUPS * 2):
                consumer = Consumer(ledger, port, group, f"{life}-reader{n}", self._new_rng())
                tasks.create_task(consumer.run())
            tasks.create_task(until_lost(repeat_acks(ledger, port)))
            await asyncio.sleep(life_s)
            assert self.broker.is_running(), self.broker.stderr()
            self.broker.kill()

    async def _drain(self) -> None:
        ledger, port = self.ledger, self.broker.port
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            drains = []
            for group in GROUPS:
                consumer = Consumer(ledger, port, group, "drain", self._new_rng(), drains=True)
                drains.append(tasks.create_task(consumer.run()))
            owed = partial(self._owed, TOPIC, GROUPS)
            await asyncio.to_thread(eventually, owed, lambda count: count == 0, PATIENCE_S)
            for task in drains:
                task.cancel()

    def _read_all(self, topic: str) -> list[Item]:
        """Everything, and not one message more."""
        kept = sum(p["retained_msgs"] for p in self._describe(topic)["partitions"])
        items = asyncio.run(read_all(self.broker.port, topic, "audit", kept))
        assert self._owed(topic, ["audit"]) == 0
        assert len(items) == kept
        return items

    def _owed(self, topic: str, groups: Collection[str]) -> int:
        described = self._describe(topic)["groups"]
        return sum(p["lag"] for g in described if g["name"] in groups for p in g["partitions"])

    def _new_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))


StartLoop = Callable[..., KillLoop]


@pytest.fixture
def seed() -> int:
    chosen = int(os.environ.get("KILL_LOOP_SEED") or secrets.randbits(32))
    print(f"KILL_LOOP_SEED={chosen}")
    return chosen


@pytest.fixture
def start_loop(tmp_path: Path, seed: int) -> Iterator[StartLoop]:
    """The data directory is kept when the test fails."""
    started: list[StartKilled] = []

    def start(*flags: str) -> KillLoop:
        broker = StartKilled(tmp_path / "data", *flags, env=SMALL)
        started.append(broker)
        return KillLoop(broker, seed)

    try:
        yield start
    finally:
        for broker in started:
            broker.close()
    shutil.rmtree(tmp_path / "data")


def test_thirty_kills_under_load_lose_nothing_and_make_nothing_up(start_loop: StartLoop) -> None:
    """driftq-17, driftq-27, driftq-30, driftq-39, driftq-46, driftq-57."""
    loop = start_loop()
    for _ in range(30):
        loop.live_and_die()
    loop.finish()
    loop.broker.wait_for_seal()
    loop.stop()
    counts = loop.ledger.counts
    rare = [what for what in KINDS if not counts[what]]
    assert not rare, f"the load never led to: {rare}"


KINDS = ("produced", "duplicates", "acked", "nacked", "again", "dead letters")


def test_a_killed_process_loses_nothing_with_fsync_interval(start_loop: StartLoop) -> None:
    """driftq-46: what was written is the kernel's; only a machine that dies can lose it."""
    loop = start_loop("--fsync", "interval")
    for _ in range(6):
        loop.live_and_die()
    loop.finish()
    loop.stop()


def test_kills_during_the_start_change_nothing(start_loop: StartLoop) -> None:
    """driftq-46: a start that is killed at any instant leaves all to the next one."""
    loop = start_loop()
    for _ in range(2):
        loop.live_and_die()
        for _ in range(4):
            loop.die_starting()
    loop.finish()
    loop.stop()
