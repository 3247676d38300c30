"""Measures how many frames a second one log can store, one at a time, on three local servers.

By hand: `python -m tests.cluster.frame_rates --seconds 3`. Next to the log's way of sending
(compare-and-append, `FrameSender`) stands plain publishing over the same kind of connection.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.cluster.frame_sender import Fate, FrameSender
from penstock.cluster.jetstream.stream import JetStreamStream
from penstock.cluster.jetstream.wire import NatsMessage
from penstock.cluster.shared import Unanswered
from penstock.engine.scheduler import LoopScheduler
from tests.cluster.jetstream_world import JetStreamBroker, JetStreamWorld
from tests.cluster.nats_servers import nats_servers

KIB = 1024
SIZES = (8 * KIB, 1024 * KIB)
Step = Callable[[Callable[[], None]], None]


async def paced(step: Step, seconds: float) -> list[float]:
    """How long each step took. The next begins when one has told that it is done."""
    took: list[float] = []
    over = asyncio.get_running_loop().create_future()
    began = last = time.perf_counter()

    def done() -> None:
        nonlocal last
        now = time.perf_counter()
        took.append(now - last)
        last = now
        if now - began < seconds:
            step(done)
        else:
            over.set_result(None)

    step(done)
    await over
    return took


def sending(stream: JetStreamStream, size: int, first: int) -> Step:
    sender = FrameSender(stream, LoopScheduler(asyncio.get_running_loop()))
    seq = first - 1

    def step(done: Callable[[], None]) -> None:
        nonlocal seq
        seq += 1

        def told(fate: Fate) -> None:
            if fate is not Fate.STORED:
                raise RuntimeError(f"message {seq} is {fate.value}")
            done()

        sender.send(seq, size * b"x", told)

    return step


def publishing(broker: JetStreamBroker, size: int) -> Step:
    connection, subject = broker.services.connection, broker.stream.place.subject.encode()

    def step(done: Callable[[], None]) -> None:
        def told(answer: NatsMessage | Unanswered) -> None:
            if isinstance(answer, Unanswered):
                raise RuntimeError(answer.reason)
            done()

        connection.request(subject, size * b"x", told, timeout_s=30.0)

    return step


def show(name: str, size: int, took: list[float]) -> None:
    rate = len(took) / sum(took)
    p50, p99 = statistics.median(took), sorted(took)[int(len(took) * 0.99)]
    print(
        f"{name:20} {size // KIB:5} KiB: {rate:7.0f} frames/s, "
        f"p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms"
    )


def measure(world: JetStreamWorld, seconds: float) -> None:
    broker = world.broker(behind_proxy=False, max_bytes=1700 * KIB * KIB)

    async def send(size: int) -> list[float]:
        return await paced(sending(broker.stream, size, first), seconds)

    async def publish(size: int) -> list[float]:
        return await paced(publishing(broker, size), seconds)

    for size in SIZES:
        for _ in range(2):
            first = world.bounds(broker.stream).last_seq + 1
            show("FrameSender", size, world.run(send(size)))
            show("plain publish", size, world.run(publish(size)))
            world.call(broker.stream.purge, world.bounds(broker.stream).last_seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    logging.basicConfig()
    with tempfile.TemporaryDirectory() as folder, nats_servers(Path(folder)) as servers:
        world = JetStreamWorld(servers)
        try:
            measure(world, arguments.seconds)
        finally:
            world.close()


if __name__ == "__main__":
    main()
