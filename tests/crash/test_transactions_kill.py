"""A broker that is killed again and again while workers consume, transform and produce.

Each message becomes two results and one more in a counter, in a transaction with its ack. What a
worker did not hear the answer to, it sends again to the next broker. Whenever the kills come, every
input has its results once. The storage tests take away what was not synced as well.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from penstock.client import Client, Delivery, NewMessage, Worker
from penstock.client.sync_transactions import Transaction
from penstock.model.errors import FailedPrecondition, PenstockError, Unavailable
from tests.broker_process import BrokerProcess, eventually

SMALL = {
    "PENSTOCK_SEGMENT_BYTES": "131072",
    "PENSTOCK_MEMORY_BYTES": "1048576",
    "PENSTOCK_MAX_IN_FLIGHT": "10000",
}
INPUTS = 400
LIVES = 4
LIFE_S = (0.05, 0.4)


class KilledWorker:
    """Sends transactions until the broker is gone, and keeps the one whose answer it lacks."""

    def __init__(self) -> None:
        self.doubtful: Transaction | None = None
        self.repeats = 0
        self.committed = 0

    def work(self, url: str) -> None:
        with Client(url) as client, suppress(Unavailable):
            if self.doubtful is not None:
                self._repeat(client)
            with client.consume("in", "g", owner="worker", prefetch=8) as stream:
                for delivery in stream:
                    self._transform(client, delivery)

    def _repeat(self, client: Client) -> None:
        assert self.doubtful is not None
        with suppress(FailedPrecondition):
            # It was lost with the broker, and the lease with it: the message comes again.
            client.send(self.doubtful.call())
        self.doubtful = None
        self.repeats += 1

    def _transform(self, client: Client, delivery: Delivery) -> None:
        tx = client.transaction()
        for part in ("a", "b"):
            tx.produce("out", f"{delivery.value} {part} ".ljust(300, "."))
        tx.ack(delivery)
        tx.cache("counts").incr("done")
        self.doubtful = tx
        tx.commit()
        self.doubtful = None
        self.committed += 1


def test_every_input_has_its_results_once_whenever_the_broker_is_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_LOOP_SEED", secrets.randbelow(2**31)))
    print(f"KILL_LOOP_SEED={seed}")
    rng = random.Random(seed)
    broker = BrokerProcess(tmp_path / "data", env=SMALL)
    try:
        with Client(broker.start().url) as client:
            for name in ("in", "out"):
                client.create_topic(name)
            client.create_cache("default", "default", "counts", durable=True)
            client.produce_batch(NewMessage("in", f"input {n}") for n in range(INPUTS))
        worker = KilledWorker()
        for _ in range(LIVES):
            killer = threading.Timer(rng.uniform(*LIFE_S), broker.kill)
            killer.start()
            worker.work(broker.url)
            killer.join()
            broker.start()
        assert worker.committed, "no life was long enough"
        finish(broker, worker)
    finally:
        broker.close()


def finish(broker: BrokerProcess, worker: KilledWorker) -> None:
    """The worker's last repeat, then the rest by the SDK's own worker; then all is counted."""
    with Client(broker.url) as client:
        if worker.doubtful is not None:
            worker._repeat(client)
        before = client.cache("counts").get("done")

        def handle(delivery: Delivery) -> list[NewMessage]:
            return [NewMessage("out", f"{delivery.value} {part} ") for part in ("a", "b")]

        rest = Worker(client, "in", "g", handle)
        thread = threading.Thread(target=rest.run)
        thread.start()
        try:
            eventually(lambda: lag(client), lambda left: left == 0, timeout_s=60)
        finally:
            rest.stop()
            thread.join(30)
        stored = values(client)
    names = [value.split(" ")[1:3] for value in stored]
    inputs = [number for number, part in names if part == "a"]
    assert [part for _, part in names] == ["a", "b"] * INPUTS, "half of one"
    assert [number for number, part in names if part == "b"] == inputs, "half of one"
    assert sorted(map(int, inputs)) == list(range(INPUTS)), "lost, or twice"
    # The results of the killed worker are long, and only its transactions are counted.
    counted = sum(value.endswith(".") for value in stored) // 2
    assert before is not None
    assert int(before.value) == counted >= worker.committed


def lag(client: Client) -> int:
    with suppress(PenstockError):
        groups = client.describe_topic("in").groups
        return sum(each.lag for group in groups for each in group.partitions)
    return -1


def values(client: Client) -> list[str]:
    with client.consume("out", "check") as stream:
        found = [next(stream).value for _ in range(2 * INPUTS)]
    assert client.describe_topic("out").next_offset == 2 * INPUTS
    return found
