"""felix-109, 110, 118, 119, 122 and 124, with a real broker that is killed again and again.

Producers repeat what was not answered, and subscribers give up in the middle and come back. When
all is over, the at-least-once stream has everything that was acknowledged, and the application
behind the exactly-once stream has seen every event once.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Client, PositionFile
from penstock.model.errors import FailedPrecondition, PenstockError
from tests.broker_process import BrokerProcess

KILLS = 4
LIFE_S = (0.3, 0.9)
PATIENCE_S = 120.0
SMALL = {"PENSTOCK_SEGMENT_BYTES": "262144", "PENSTOCK_MEMORY_BYTES": "1048576"}
ORDERS, TRANSACTIONS = "orders", "transactions"


class Load:
    """Threads that publish and subscribe until they are told to stop."""

    def __init__(self, broker: BrokerProcess, directory: Path, seed: int) -> None:
        self.url = broker.url
        self.rng = random.Random(seed)
        self.stop_publishing = threading.Event()
        self.stop_reading = threading.Event()
        self.acknowledged: list[bytes] = []
        self.numbered = 0
        self.seen: list[bytes] = []
        self.effects: list[bytes] = []
        self.position = PositionFile(directory / "position")
        self.failures: list[BaseException] = []
        self.publishers = [self._thread(self._publish), self._thread(self._publish_numbered)]
        self.readers = [self._thread(self._read), self._thread(self._apply)]

    def _thread(self, work) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _publish(self) -> None:
        """At least once: repeats whatever was not answered."""
        with Client(self.url) as client:
            number = 0
            while not self.stop_publishing.is_set():
                payload = b"%d" % number
                try:
                    client.stream(ORDERS).publish(payload)
                except PenstockError as error:
                    if not error.retryable:
                        raise
                    time.sleep(0.05)
                else:
                    self.acknowledged.append(payload)
                    number += 1

    def _publish_numbered(self) -> None:
        with Client(self.url) as client:
            producer = client.stream(TRANSACTIONS).producer(retry_s=PATIENCE_S)
            while not self.stop_publishing.is_set():
                producer.publish(b"%d" % self.numbered)
                self.numbered += 1

    def _read(self) -> None:
        """Acks most events, and now and then goes away without."""
        while not self.stop_reading.is_set():
            try:
                with (
                    Client(self.url) as client,
                    client.stream(ORDERS).subscribe(
                        name="audit", start="earliest", lease_ms=500, wait_s=1
                    ) as events,
                ):
                    for event in events:
                        self.seen.append(event.payload)
                        if self.rng.random() < 0.005:
                            break
                        event.ack()
            except FailedPrecondition:
                continue  # its lease has ended, and another delivery has begun
            except PenstockError as error:
                if not error.retryable:
                    raise
                time.sleep(0.05)

    def _apply(self) -> None:
        """Exactly once: the effect and the position are kept together."""
        while not self.stop_reading.is_set():
            try:
                with (
                    Client(self.url) as client,
                    client.stream(TRANSACTIONS).subscribe(
                        name="ledger",
                        start="earliest",
                        lease_ms=500,
                        once=self.position,
                        wait_s=1,
                    ) as events,
                ):
                    for event in events:
                        if self.rng.random() < 0.005:
                            break
                        self.effects.append(event.payload)
                        event.ack()
            except FailedPrecondition:
                continue
            except PenstockError as error:
                if not error.retryable:
                    raise
                time.sleep(0.05)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path / "data", env=SMALL)
    try:
        yield process.start()
    finally:
        process.close()
        shutil.rmtree(tmp_path / "data")


def test_streams_keep_their_promises_under_kills(broker: BrokerProcess, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    broker.keep_port()
    with Client(broker.url) as client:
        client.create_stream("default", "default", ORDERS, delivery="at_least_once")
        client.create_stream("default", "default", TRANSACTIONS, delivery="exactly_once")
    load = Load(broker, tmp_path, seed)
    for _ in range(KILLS):
        time.sleep(rng.uniform(*LIFE_S))
        broker.restart(kill=True)
    time.sleep(LIFE_S[1])
    load.stop_publishing.set()
    for thread in load.publishers:
        thread.join(PATIENCE_S)
    until = time.monotonic() + PATIENCE_S
    expected = [b"%d" % number for number in range(load.numbered)]
    while time.monotonic() < until and not (
        set(load.acknowledged) <= set(load.seen) and len(load.effects) >= len(expected)
    ):
        time.sleep(0.1)
    load.stop_reading.set()
    for thread in load.readers:
        thread.join(PATIENCE_S)
    assert load.failures == []
    assert len(load.acknowledged) > 20
    assert len(expected) > 20
    assert set(load.acknowledged) <= set(load.seen), "an acknowledged event got lost"
    twice = [payload for payload, count in Counter(load.effects).items() if count > 1]
    assert not twice, "an event had its effect twice"
    assert set(load.effects) == set(expected), "an event had no effect"
    with (
        Client(broker.url) as client,
        client.stream(TRANSACTIONS).subscribe(start="earliest", wait_s=1) as events,
    ):
        assert [event.payload for event in events] == expected, "stored twice, or out of order"
