"""A worker that stops gives back what it did not begin: no attempt is lost, no lease is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.client import (
    AsyncClient,
    AsyncWorker,
    Client,
    Delivery,
    EffectRef,
    Envelope,
    NewMessage,
    RetryPolicy,
    Worker,
)
from penstock.client.calls import Call
from penstock.client.results import GroupProgress
from penstock.model.errors import NotFound
from tests.broker_process import SOURCE, BrokerProcess, eventually
from tests.client.test_async_worker import PATIENCE_S, nothing
from tests.client.test_async_worker import running as running_async
from tests.client.test_worker import running
from tests.tls_proxy import make_certificate, tls_proxy

T = TypeVar("T")

ONE_ATTEMPT = Envelope(retry_policy=RetryPolicy(max_attempts=1))
"""One delivery that counts, and the message is dead."""


def progress(client: Client, topic: str) -> GroupProgress:
    return client.describe_topic(topic).groups[0].partitions[0]


def dead_letters(client: Client, topic: str) -> int:
    name = f"dlq.{topic}"
    return client.describe_topic(name).next_offset if name in client.list_topics() else 0


def produce(client: Client, topic: str, count: int) -> None:
    messages = [NewMessage(topic, str(n), "", ONE_ATTEMPT) for n in range(count)]
    outcomes = client.produce_batch(messages)
    assert all(not isinstance(outcome, Exception) for outcome in outcomes)


def drain(client: Client, topic: str, count: int) -> list[tuple[str, int]]:
    """What another worker gets, with its attempts, at once and without waiting for a lease."""
    found = []
    with client.consume(topic, "g", wait_s=10) as stream:
        for delivery in stream:
            found.append((delivery.value, delivery.attempts))
            client.ack(delivery)
            if len(found) == count:
                break
    return found


def has_consumer(client: Client, topic: str) -> bool:
    groups = client.describe_topic(topic).groups
    return bool(groups) and groups[0].consumers > 0


# -- the plain worker ------------------------------------------------------------------------------


def test_a_message_that_comes_while_an_idle_worker_stops_is_not_dead_lettered(
    client: Client, topic: str
) -> None:
    handled: list[str] = []
    for number in range(5):
        worker = Worker(client, topic, "g", lambda each: handled.append(each.value))
        with running(worker):
            eventually(lambda: has_consumer(client, topic))
            worker.stop()
            client.produce(topic, str(number), envelope=ONE_ATTEMPT)
    assert dead_letters(client, topic) == 0
    assert progress(client, topic).in_flight == 0
    left = [str(number) for number in range(5) if str(number) not in handled]
    assert drain(client, topic, len(left)) == [(value, 1) for value in left]


class Straggler(Worker):
    """Stops in the moment in which a delivery has come and nothing was begun."""

    def _follow(self, stream: object) -> None:
        time.sleep(0.5)  # the delivery is in the socket, and nobody has read it
        self.stop()


def test_what_is_in_the_socket_when_the_worker_stops_is_given_back(
    client: Client, topic: str
) -> None:
    """The race that is hard to hit is played: a delivery was sent, and not read."""
    client.produce(topic, "v", envelope=ONE_ATTEMPT)
    Straggler(client, topic, "g", print).run()
    assert (progress(client, topic).in_flight, dead_letters(client, topic)) == (0, 0)
    assert drain(client, topic, 1) == [("v", 1)]


def test_an_idle_worker_is_woken_by_its_stop(client: Client, topic: str) -> None:
    worker = Worker(client, topic, "g", print)
    with running(worker) as thread:
        eventually(lambda: has_consumer(client, topic))
        worker.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert client.describe_topic(topic).groups[0].consumers == 0


def test_a_worker_that_waits_for_an_effect_gives_the_message_back(
    client: Client, topic: str
) -> None:
    theirs = EffectRef(topic=topic, group="g", key="k", owner="other")
    client.begin_effect(theirs, 60_000)
    policy = RetryPolicy(max_attempts=1)
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k", retry_policy=policy))
    worker = Worker(client, topic, "g", print, effect=True)
    with running(worker):
        eventually(lambda: has_consumer(client, topic) and progress(client, topic).in_flight)
    assert (progress(client, topic).in_flight, dead_letters(client, topic)) == (0, 0)
    assert drain(client, topic, 1) == [("v", 1)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_handler_is_nacked_and_leaves_no_lease(
    client: Client, topic: str, kind: type[BaseException]
) -> None:
    def handle(delivery: Delivery) -> None:
        raise kind

    client.produce(topic, "v")
    with pytest.raises(kind):
        Worker(client, topic, "g", handle, effect=True).run()
    again = next(client.consume(topic, "g", wait_s=10))
    assert (again.attempts, again.last_error) == (2, f"{kind.__name__}: the worker ended")
    effect = EffectRef(topic=topic, group="g", key="offset-0", owner="next")
    assert client.begin_effect(effect).status == "RUN"


PROGRAM = """
import signal, sys, time
from penstock.client import Client, Worker

def handle(delivery):
    time.sleep(0.5)

with Client() as client:
    worker = Worker(client, sys.argv[1], "g", handle)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()
"""


def test_a_signal_that_calls_stop_leaves_no_lease_behind(client: Client, topic: str) -> None:
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], "PENSTOCK_URL": client.url}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, topic], env=env, stderr=subprocess.DEVNULL
    )
    try:
        eventually(lambda: has_consumer(client, topic), timeout_s=30)
        process.send_signal(signal.SIGTERM)
        client.produce(topic, "v", envelope=ONE_ATTEMPT)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    # Less than the lease of 30 s, which would end by itself.
    eventually(lambda: progress(client, topic).in_flight, lambda count: count == 0, timeout_s=20)
    assert process.returncode == 0
    assert dead_letters(client, topic) == 0


# -- the worker for asyncio ------------------------------------------------------------------------


def test_async_stops_with_a_backlog_bury_nothing_and_leave_no_lease(
    client: Client, topic: str
) -> None:
    produce(client, topic, 2000)
    handled: list[str] = []

    async def scenario() -> None:
        for _ in range(8):
            twenty = asyncio.Semaphore(0)

            async def handle(delivery: Delivery) -> None:
                handled.append(delivery.value)
                await asyncio.sleep(0.002)
                twenty.release()  # noqa: B023 - used in this round only

            async with AsyncClient(client.url) as mine:
                worker = AsyncWorker(mine, topic, "g", handle, concurrency=5)
                async with running_async(worker):
                    for _ in range(20):
                        await twenty.acquire()
            assert (await asyncio.to_thread(progress, client, topic)).in_flight == 0

    asyncio.run(scenario())
    assert dead_letters(client, topic) == 0
    assert len(set(handled)) == len(handled)
    left = 2000 - len(handled)
    assert progress(client, topic).lag == left
    assert all(attempts == 1 for _, attempts in drain(client, topic, 20))


def test_async_what_was_not_begun_goes_back_before_the_handlers_end(
    client: Client, topic: str
) -> None:
    """Another worker need not wait for the slowest handler of this one."""
    produce(client, topic, 6)

    async def scenario() -> None:
        began, may_end = asyncio.Semaphore(0), asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            began.release()
            await may_end.wait()

        async with AsyncClient(client.url) as mine:
            worker = AsyncWorker(mine, topic, "g", handle, concurrency=4)
            worker._room = asyncio.Semaphore(2)  # so that two are received and not begun
            async with running_async(worker):
                await began.acquire()
                await began.acquire()
                await asyncio.to_thread(
                    eventually, lambda: progress(client, topic).in_flight, lambda count: count == 4
                )
                worker.stop()
                await asyncio.to_thread(
                    eventually, lambda: progress(client, topic).in_flight, lambda count: count == 2
                )
                may_end.set()

    asyncio.run(scenario())
    assert (progress(client, topic).in_flight, dead_letters(client, topic)) == (0, 0)
    assert drain(client, topic, 4) == [(str(n), 1) for n in range(2, 6)]


def test_async_a_cancelled_worker_leaves_no_lease(client: Client, topic: str) -> None:
    produce(client, topic, 6)
    client.produce(topic, "kept")

    async def scenario() -> None:
        began = asyncio.Semaphore(0)

        async def handle(delivery: Delivery) -> None:
            began.release()
            await asyncio.sleep(60)

        async with AsyncClient(client.url) as mine:
            worker = AsyncWorker(mine, topic, "g", handle, concurrency=4)
            worker._room = asyncio.Semaphore(2)
            task = asyncio.create_task(worker.run())
            await began.acquire()
            await began.acquire()
            await asyncio.to_thread(
                eventually, lambda: progress(client, topic).in_flight, lambda count: count == 4
            )
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert progress(client, topic).in_flight == 0
    # Two handlers had begun: with one attempt allowed, theirs are the dead letters.
    eventually(lambda: dead_letters(client, topic), lambda count: count == 2)
    assert drain(client, topic, 5)[:4] == [(str(n), 1) for n in range(2, 6)]


def test_async_a_handler_that_cancels_itself_is_a_failure(client: Client, topic: str) -> None:
    client.produce(topic, "v")
    seen: list[str] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.last_error)
        if delivery.attempts == 1:
            raise asyncio.CancelledError

    async def scenario() -> None:
        async with (
            AsyncClient(client.url) as mine,
            running_async(AsyncWorker(mine, topic, "g", handle)),
        ):
            await asyncio.to_thread(
                eventually, lambda: len(seen) == 2 and progress(client, topic).lag == 0
            )

    asyncio.run(scenario())
    assert seen[-1].startswith("CancelledError")


# -- odd ways to the broker ------------------------------------------------------------------------


def test_behind_tls_an_idle_worker_stops_soon_too(
    broker: BrokerProcess, client: Client, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One side of a TLS connection cannot be closed alone; the next heartbeat wakes the worker."""
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    with tls_proxy(broker.port, certificate) as url, Client(url) as secure:
        handled: list[str] = []
        worker = Worker(secure, topic, "g", lambda each: handled.append(each.value))
        with running(worker):
            client.produce(topic, "v")
            eventually(lambda: handled)
        assert progress(client, topic).in_flight == 0


class OlderClient(Client):
    """Of a broker before there was `release`."""

    def send(self, call: Call[T]) -> T:
        if call.path.startswith("/v1/release"):
            raise NotFound("no such path: /v1/release/batch")
        return super().send(call)


class OlderAsyncClient(AsyncClient):
    async def send(self, call: Call[T]) -> T:
        if call.path.startswith("/v1/release"):
            raise NotFound("no such path: /v1/release/batch")
        return await super().send(call)


def test_with_an_older_broker_what_was_not_begun_is_nacked(client: Client, topic: str) -> None:
    client.produce(topic, "v")
    with OlderClient(client.url) as mine:
        Straggler(mine, topic, "g", print).run()
    again = next(client.consume(topic, "g", wait_s=10))
    assert again.last_error == "the worker stopped before it began"


def test_async_with_an_older_broker_what_was_not_begun_is_nacked(
    client: Client, topic: str
) -> None:
    client.produce(topic, "v")

    async def scenario() -> None:
        async with OlderAsyncClient(client.url) as mine:
            worker = AsyncWorker(mine, topic, "g", nothing)
            worker._room = asyncio.Semaphore(0)
            async with running_async(worker):
                await asyncio.to_thread(
                    eventually,
                    lambda: has_consumer(client, topic) and progress(client, topic).in_flight,
                )

    asyncio.run(scenario())
    again = next(client.consume(topic, "g", wait_s=10))
    assert again.last_error == "the worker stopped before it began"
