"""What goes on at a broker while pipelines are killed: messages for each of them, and a worker.

Values tell every message from every other. At the end nothing is under way: each job is done or
given up, so that the journal stands still.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from penstock.client import Client, Envelope, NewMessage, RetryPolicy
from penstock.model.errors import PenstockError
from tests.broker_process import BrokerProcess

EACH_S = 0.3
FEWEST = 10
HOUR_MS = 3_600_000


class Traffic:
    """Messages for every pipeline, and a worker that acks, nacks and gives up; until the end of
    the `with`, and then nothing is under way."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._client = Client(broker.url, timeout_s=90)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(60)
        self._client.close()
        if self._error is not None:
            raise self._error

    def _go(self) -> None:
        number = 0
        try:
            with self._client.consume(
                "jobs", "workers", owner="worker", lease_ms=HOUR_MS, wait_s=60
            ) as jobs:
                is_last = False
                while not is_last:
                    # Something comes after the last kill, too.
                    is_last = self._ended.wait(EACH_S) and number >= FEWEST
                    self._produce(number)
                    self._work(jobs)
                    number += 1
        except BaseException as error:  # noqa: BLE001 - raised where the traffic ends
            self._error = error

    def _produce(self, number: int) -> None:
        first = 3 * number
        messages = [_job(number)]
        for n in range(first, first + 3):
            messages += [
                NewMessage("intake", f"intake {n}", f"key {n % 5}"),
                NewMessage("orders", _order(n), f"cart {n % 7}"),
                NewMessage("state", "null" if n % 11 == 0 else f"value {n}", f"k{n % 17}"),
            ]
        for outcome in self._client.produce_batch(messages):
            if isinstance(outcome, PenstockError):
                raise outcome

    def _work(self, jobs: Iterator[Any]) -> None:
        """One job to its end: every third fails once, every fifth until it is a dead letter."""
        while True:
            job = next(jobs)
            number = int(job.value.split()[1])
            if number % 5 == 0 or (number % 3 == 0 and job.attempts == 1):
                self._client.nack(job, f"no memory for job {number}, {'abc'[number % 3] * 4}")
                if job.attempts < 2:
                    continue
            else:
                self._client.ack(job)
            return


def _job(number: int) -> NewMessage:
    envelope = Envelope(
        run_id=f"run-{number // 4}",
        step_id=f"step-{number % 4}",
        parent_step_id=f"step-{number % 4 - 1}" if number % 4 else "",
        tenant_id=f"tenant-{number % 2}",
        retry_policy=RetryPolicy(2, 0),
    )
    return NewMessage("jobs", f"job {number}", f"key {number}", envelope)


def _order(number: int) -> str:
    if number % 9 == 0:
        return f"no order {number}"
    return json.dumps({"item": f"item {number % 4}", "count": number})
