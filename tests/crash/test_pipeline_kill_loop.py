"""felix-123 under kills: from one durable stream to another, every event once.

Two processes share a named subscription. Each publishes what it makes of an event in a transaction
with the ack. At random the broker is killed, a process is killed and replaced, or one is stopped
until its lease has ended, so that it is too late when it goes on. In the end the target has one
result for every event of the source, and the counter agrees.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Client
from tests.broker_process import BrokerProcess, eventually
from tests.crash.pipeline_process import COUNTS, LEASE_MS, NAME, SOURCE, TARGET

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"PENSTOCK_SEGMENT_BYTES": "262144", "PENSTOCK_MEMORY_BYTES": "1048576"}
ROUNDS = 2
FAULTS = ("kill broker", "kill process", "stop process")
PAUSE_S = (0.2, 0.9)
PATIENCE_S = 120.0
STOP_S = 10.0


class Pipeline:
    """The processes that consume and publish. Killed ones are replaced under the same owner."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._processes = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        return subprocess.Popen(
            [sys.executable, "-m", "tests.crash.pipeline_process", self._url, f"owner-{number}"],
            env=os.environ | {"PYTHONPATH": path},
        )

    def kill_one(self, number: int) -> None:
        self._end(number)
        self._processes[number] = self._start(number)

    def stop_one(self, number: int) -> None:
        """Stops a process for longer than its leases, in the midst of whatever it does."""
        process = self._processes[number]
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(2 * LEASE_MS / 1000)
        finally:
            process.send_signal(signal.SIGCONT)

    def must_run(self) -> None:
        codes = [process.poll() for process in self._processes]
        assert codes == [None, None], "a process gave up"

    def close(self) -> None:
        for number in range(2):
            self._end(number)

    def _end(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait(STOP_S)


class Publisher:
    """Publishes numbers to the source until it is told to stop."""

    def __init__(self, url: str) -> None:
        self.published = 0
        self.failure: BaseException | None = None
        self._url = url
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Client(self._url) as client:
                producer = client.stream(SOURCE).producer(retry_s=PATIENCE_S)
                while not self._is_stopping.wait(0.002):
                    producer.publish(b"%d" % self.published)
                    self.published += 1
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failure = error

    def finish(self) -> int:
        self._is_stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        assert self.failure is None, self.failure
        return self.published


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path / "data", env=SMALL)
    try:
        yield process.start()
    finally:
        process.close()


def test_every_event_has_its_result_once_whoever_is_killed(broker: BrokerProcess) -> None:
    seed = int(os.environ.get("KILL_LOOP_SEED", secrets.randbelow(2**31)))
    print(f"KILL_LOOP_SEED={seed}")
    rng = random.Random(seed)
    broker.keep_port()
    with Client(broker.url) as client:
        for stream in (SOURCE, TARGET):
            client.create_stream("default", "default", stream, delivery="at_least_once")
        client.create_cache("default", "default", COUNTS, durable=True)
    publisher, pipeline = Publisher(broker.url), Pipeline(broker.url)
    try:
        eventually(lambda: done_so_far(broker), timeout_s=PATIENCE_S)
        for fault in rng.sample(FAULTS * ROUNDS, len(FAULTS) * ROUNDS):
            time.sleep(rng.uniform(*PAUSE_S))
            before = done_so_far(broker)
            inflict(fault, broker, pipeline, rng)
            # Every fault meets work under way, also on a slow machine.
            eventually(
                lambda before=before: done_so_far(broker) > before,  # type: ignore[misc]
                timeout_s=PATIENCE_S,
            )
        published = publisher.finish()
        eventually(lambda: left(broker), lambda number: number == 0, timeout_s=PATIENCE_S)
        pipeline.must_run()
    finally:
        pipeline.close()
    check_results(broker, published)


def inflict(fault: str, broker: BrokerProcess, pipeline: Pipeline, rng: random.Random) -> None:
    if fault == "kill broker":
        broker.restart(kill=True)
    elif fault == "kill process":
        pipeline.kill_one(rng.randrange(2))
    else:
        pipeline.stop_one(rng.randrange(2))


def check_results(broker: BrokerProcess, published: int) -> None:
    assert published > 50
    with (
        Client(broker.url) as client,
        client.stream(TARGET).subscribe(start="earliest", wait_s=1) as events,
    ):
        results = [event.payload for event in events]
    assert done_so_far(broker) == len(results)
    twice = [result for result, count in Counter(results).items() if count > 1]
    assert not twice, "an event has its result twice"
    expected = {b"invoice %d" % number for number in range(published)}
    assert set(results) == expected, "an event has no result"


def done_so_far(broker: BrokerProcess) -> int:
    """What the transactions have counted."""
    with Client(broker.url) as client:
        entry = client.cache(COUNTS).get("done")
    return 0 if entry is None else int(entry.value)


def left(broker: BrokerProcess) -> int:
    streams = "/v1/tenants/default/namespaces/default/streams"
    reply = broker.client.get(f"{streams}/{SOURCE}/subscriptions").json()
    (named,) = reply["named"]
    assert named["name"] == NAME
    behind: int = named["messages_behind"]
    return behind
