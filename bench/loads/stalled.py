"""Effect of a subscriber that does not read on publishers and nine healthy subscribers.

Turns with and without it alternate, four times per run, and the times of all turns are combined.
The buffer of the stalled subscriber is full before its turns begin, and the broker keeps dropping
events for it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import quantiles

import msgspec
import uvloop

from bench.lean_socket import JSON, upgrade_request
from bench.pace import keep_pace
from bench.processes import Broker
from bench.pubsub import (
    EVENT_TEXT,
    STREAM_PATH,
    SUBSCRIBE,
    BrokerPubSub,
    PubSub,
    Report,
    subscriptions,
)
from bench.rows import BenchFailed, Row, Target
from bench.setting import Setting

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


# -- the stalled subscriber ------------------------------------------------------------------------

_RECEIVE_BYTES = 4096
"""Small, so that the system buffers little of what the subscriber does not read."""
_EVENTS = 1000
_TIMEOUT_S = 60.0


class StalledSubscriber:
    def __init__(self, broker: Broker, subscription_id: str) -> None:
        self._broker = broker
        self._id = subscription_id

    def report(self) -> Report:
        for report in subscriptions(self._broker):
            if report.subscription_id == self._id:
                return report
        raise BenchFailed("the broker has closed the stalled subscription")


@contextmanager
def stalled_subscriber(broker: Broker) -> Iterator[StalledSubscriber]:
    """Opens a stalled subscription; its buffer is full while the block runs."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        connection.settimeout(_TIMEOUT_S)
        connection.connect(("127.0.0.1", broker.port))
        connection.sendall(upgrade_request(JSON))
        _read_until(connection, b"\r\n\r\n")
        connection.sendall(SUBSCRIBE)
        frame = _read_until(connection, b"}")
        answer = msgspec.json.decode(frame[frame.index(b"{") :])
        subscriber = StalledSubscriber(broker, answer["subscription_id"])
        _fill(broker, subscriber)
        yield subscriber


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        more = connection.recv(_RECEIVE_BYTES)
        if not more:
            raise BenchFailed(f"the broker closed the connection after {data.decode()}")
        data += more
    return data


def _fill(broker: Broker, subscriber: StalledSubscriber) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    payloads = [EVENT_TEXT] * _EVENTS
    while not subscriber.report().dropped:
        if time.monotonic() > deadline:
            raise BenchFailed("the broker drops nothing for a subscriber that does not read")
        broker.ask("POST", f"{STREAM_PATH}/publish_batch", {"payloads": payloads})


# -- the load --------------------------------------------------------------------------------------

_GIVE_UP_S = 2.0
_LOOK_S = 0.02


class PacedPublish:
    """Publishes without waiting for acks, so that a stall of the broker shows in the times."""

    def __init__(self, pubsub: PubSub, subscribers: int, per_second: int) -> None:
        self.took: list[float] = []
        """In ms."""
        self.lost = 0
        self._pubsub = pubsub
        self._subscribers = subscribers
        self._per_second = per_second
        self._sent: deque[float] = deque()
        self._arrived = 0
        self._last_sign = 0.0
        self._error: Exception | None = None

    async def run(self, seconds: float) -> None:
        subscribers = [
            await self._pubsub.subscribe(self._on_events, self._failed)
            for _ in range(self._subscribers)
        ]
        publisher = await self._pubsub.publisher(1, self._on_acks, self._failed)

        def publish(_: int) -> None:
            if self._error is not None:
                raise self._error
            self._sent.append(time.perf_counter())
            publisher.publish()

        await keep_pace(self._per_second, seconds, publish)
        await self._settle()
        for each in (*subscribers, publisher):
            each.close()

    async def _settle(self) -> None:
        """Waits until everything is acked and received, or nothing has arrived for a while."""
        while self._sent or self._missing():
            if self._error is not None:
                raise self._error
            if time.perf_counter() - self._last_sign > _GIVE_UP_S:
                break
            await asyncio.sleep(_LOOK_S)
        if self._sent:
            raise BenchFailed(f"{len(self._sent)} publishes were not acked")
        self.lost = self._missing()

    def _missing(self) -> int:
        return len(self.took) * self._subscribers - self._arrived

    def _on_events(self, count: int) -> None:
        self._arrived += count
        self._last_sign = time.perf_counter()

    def _on_acks(self, count: int) -> None:
        self._last_sign = now = time.perf_counter()
        for _ in range(count):
            self.took.append((now - self._sent.popleft()) * 1000)

    def _failed(self, error: Exception) -> None:
        self._error = error
