"""The worker for asyncio against a real broker: as the other one, and several messages at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncClient, AsyncWorker, Client, Delivery, Envelope
from penstock.model.errors import FailedPrecondition, InvalidArgument
from tests.broker_process import BrokerProcess, eventually
from tests.client.test_worker import effect_of, lag

PATIENCE_S = 20.0

Handle = Callable[[Delivery], Awaitable[object]]


@asynccontextmanager
async def running(worker: AsyncWorker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        await asyncio.wait_for(task, PATIENCE_S)


async def all_done(client: Client, topic: str) -> None:
    await asyncio.to_thread(eventually, lambda: lag(client, topic), lambda left: left == 0)


def work(client: Client, topic: str, handle: Handle, values: list[str], **options: Any) -> None:
    """Gives the values to a worker, and comes back when they are done."""
    envelope = options.pop("envelope", None)
    for value in values:
        client.produce(topic, value, envelope=envelope)

    async def scenario() -> None:
        async with (
            AsyncClient(client.url) as mine,
            running(AsyncWorker(mine, topic, "g", handle, **options)),
        ):
            await all_done(client, topic)

    asyncio.run(scenario())


def test_async_a_message_is_acked_when_the_handler_returns(client: Client, topic: str) -> None:
    seen: list[str] = []

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        seen.append(delivery.value)

    work(client, topic, handle, ["0", "1", "2"])
    assert seen == ["0", "1", "2"]


def test_async_an_exception_is_a_nack_with_its_text(client: Client, topic: str) -> None:
    errors: list[str] = []

    async def handle(delivery: Delivery) -> None:
        errors.append(delivery.last_error)
        if delivery.attempts < 3:
            raise ValueError("not yet")

    work(client, topic, handle, ["v"])
    assert errors == ["", "ValueError: not yet", "ValueError: not yet"]


def test_async_the_lease_is_extended_while_the_handler_runs(client: Client, topic: str) -> None:
    attempts: list[int] = []

    async def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempts)
        await asyncio.sleep(1.0)

    work(client, topic, handle, ["v"], lease_ms=300)
    assert attempts == [1]


def test_async_no_more_than_concurrency_are_handled_at_once(client: Client, topic: str) -> None:
    """The first three wait for each other: one at a time, none would ever end."""
    together = asyncio.Barrier(3)
    at_once: list[int] = []
    under_way = 0

    async def handle(delivery: Delivery) -> None:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        await together.wait()
        under_way -= 1

    work(client, topic, handle, [str(n) for n in range(30)], concurrency=3)
    assert len(at_once) == 30
    assert max(at_once) == 3


def test_async_stop_finishes_what_is_under_way_and_takes_no_other(
    client: Client, topic: str
) -> None:
    for n in range(9):
        client.produce(topic, str(n))
    done: list[str] = []

    async def scenario() -> None:
        began, may_end = asyncio.Semaphore(0), asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            began.release()
            await may_end.wait()
            done.append(delivery.value)

        async with AsyncClient(client.url) as mine:
            worker = AsyncWorker(mine, topic, "g", handle, concurrency=2)
            async with running(worker) as task:
                await began.acquire()
                await began.acquire()
                worker.stop()
                await asyncio.sleep(0.1)
                assert not task.done()
                may_end.set()

    asyncio.run(scenario())
    group = client.describe_topic(topic).groups[0].partitions[0]
    assert (sorted(done), group.lag, group.in_flight) == (["0", "1"], 7, 0)


def test_async_an_idle_worker_stops_at_once(client: Client, topic: str) -> None:
    async def scenario() -> None:
        async with (
            AsyncClient(client.url) as mine,
            running(AsyncWorker(mine, topic, "g", nothing)),
        ):
            await asyncio.to_thread(eventually, lambda: client.describe_topic(topic).groups)

    asyncio.run(scenario())


def test_async_a_worker_that_is_cancelled_leaves_its_messages_to_others(
    client: Client, topic: str
) -> None:
    client.produce(topic, "v")
    ends: list[str] = []

    async def scenario() -> None:
        began = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        async with AsyncClient(client.url) as mine:
            task = asyncio.create_task(AsyncWorker(mine, topic, "g", handle).run())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert ends == ["cancelled"]
    again = next(client.consume(topic, "g", wait_s=PATIENCE_S))
    reason = "CancelledError: the handler was cancelled"
    assert (again.value, again.attempts, again.last_error) == ("v", 2, reason)


def test_async_a_worker_lives_through_a_restart_of_its_broker(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    seen: list[str] = []

    async def handle(delivery: Delivery) -> None:
        seen.append(delivery.value)

    async def scenario() -> None:
        async with (
            AsyncClient(broker.url) as mine,
            running(AsyncWorker(mine, "t", "g", handle, concurrency=2)),
        ):
            client.produce("t", "before")
            await all_done(client, "t")
            broker.flags = ("--port", str(broker.port))
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            client.produce("t", "after")
            await all_done(client, "t")

    try:
        broker.start().create_topic("t")
        with Client(broker.url) as client:
            asyncio.run(scenario())
    finally:
        broker.close()
    assert seen == ["before", "after"]


async def nothing(delivery: Delivery) -> None: ...


def test_async_an_error_of_the_broker_ends_the_run_when_the_rest_is_finished(
    client: Client, topic: str
) -> None:
    """An address that is refused is no outage: waiting cannot mend it."""
    client.produce(topic, "v")
    done: list[str] = []

    async def scenario() -> None:
        async with AsyncClient(client.url) as mine:
            worker: AsyncWorker

            async def handle(delivery: Delivery) -> None:
                worker._lease_ms = -1  # the next stream is refused
                await mine.delete_topic(topic)
                await mine.create_topic(topic)
                await asyncio.sleep(0.3)
                done.append(delivery.value)

            worker = AsyncWorker(mine, topic, "g", handle)
            with pytest.raises(InvalidArgument, match="lease_ms"):
                await asyncio.wait_for(worker.run(), PATIENCE_S)

    asyncio.run(scenario())
    assert done == ["v"]


def test_what_cannot_work_is_refused() -> None:
    def plain(delivery: Delivery) -> None: ...

    client: Any = None
    with pytest.raises(InvalidArgument, match="async def"):
        AsyncWorker(client, "t", "g", plain)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="concurrency"):
        AsyncWorker(client, "t", "g", nothing, concurrency=0)
    AsyncWorker(client, "t", "g", functools.partial(nothing))


# -- effects -------------------------------------------------------------------------------------


def once(runs: list[str], fails: int = 0) -> Handle:
    async def handle(delivery: Delivery) -> str:
        runs.append(delivery.value)
        if len(runs) <= fails:
            raise ValueError("not yet")
        return f"did {delivery.value}"

    return handle


KEYED = Envelope(idempotency_key="k")


def test_async_an_effect_is_committed_with_its_result_before_the_ack(
    client: Client, topic: str
) -> None:
    """driftq-62"""
    runs: list[str] = []
    work(client, topic, once(runs, fails=2), ["v"], effect=True, envelope=KEYED)
    begun = client.begin_effect(effect_of(topic, "k"))
    assert (begun.status, begun.result) == ("COMMITTED", "did v")
    assert runs == ["v"] * 3


def test_async_an_effect_that_another_runs_is_waited_for(client: Client, topic: str) -> None:
    """driftq-62: two workers at once."""
    client.begin_effect(effect_of(topic, "k"), 60_000)
    client.produce(topic, "v", envelope=KEYED)
    runs: list[str] = []

    async def scenario() -> None:
        async with AsyncClient(client.url) as mine:
            worker = AsyncWorker(mine, topic, "g", once(runs), effect=True, lease_ms=600)
            async with running(worker):
                await asyncio.sleep(1.0)
                (group,) = (await mine.describe_topic(topic)).groups
                assert (runs, group.partitions[0].in_flight) == ([], 1)
                await mine.commit_effect(effect_of(topic, "k"), "theirs")
                await all_done(client, topic)

    asyncio.run(scenario())
    assert runs == []


def test_async_the_lease_of_an_effect_is_renewed_while_it_runs(client: Client, topic: str) -> None:
    refused: list[str] = []

    async def handle(delivery: Delivery) -> str:
        await asyncio.sleep(1.0)
        with pytest.raises(FailedPrecondition):
            await asyncio.to_thread(client.begin_effect, effect_of(topic, "k"))
        refused.append(delivery.value)
        return "done"

    work(client, topic, handle, ["v"], effect=True, lease_ms=300, envelope=KEYED)
    assert refused == ["v"]
