"""A worker waits for a topic that was deleted and for a token that is refused, and logs it once."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from penstock.client import AsyncClient, AsyncWorker, Client, Delivery, Worker
from penstock.client.credentials import Token
from penstock.model.errors import NotFound, Unauthenticated
from tests.broker_process import BrokerProcess, eventually
from tests.client.test_worker_stop import has_consumer, progress

PATIENCE_S = 30.0


@contextmanager
def at_work(kind: str, url: str, topic: str, seen: list[str], token: Token = "") -> Iterator[Stop]:
    """A worker of this kind in a thread; yields what stops it and waits for its end."""
    handle: Callable[[Delivery], None] = lambda delivery: seen.append(delivery.value)  # noqa: E731
    target, stop = (_plain if kind == "plain" else _async)(url, topic, handle, token)
    thread = Thread(target=target)
    thread.start()

    def end() -> None:
        stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    try:
        yield end
    finally:
        end()


Stop = Callable[[], None]
Handle = Callable[[Delivery], None]
Work = Callable[[str, str, Handle, Token], tuple[Stop, Stop]]


def _plain(url: str, topic: str, handle: Handle, token: Token) -> tuple[Stop, Stop]:
    client = Client(url, token=token)
    worker = Worker(client, topic, "g", handle)

    def run() -> None:
        with client:
            worker.run()

    return run, worker.stop


def _async(url: str, topic: str, handle: Handle, token: Token) -> tuple[Stop, Stop]:
    stops: list[Stop] = []

    async def each(delivery: Delivery) -> None:
        handle(delivery)

    async def scenario() -> None:
        async with AsyncClient(url, token=token) as client:
            worker = AsyncWorker(client, topic, "g", each, concurrency=3)
            loop = asyncio.get_running_loop()

            def stop_there() -> None:
                loop.call_soon_threadsafe(worker.stop)

            stops.append(stop_there)
            await worker.run()

    def stop() -> None:
        if stops:
            stops.pop()()

    return lambda: asyncio.run(scenario()), stop


def told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_worker_outlives_the_deletion_of_its_topic(
    client: Client, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"reborn-{kind}"
    client.create_topic(topic)
    seen: list[str] = []
    caplog.set_level(logging.INFO, "penstock.worker")
    with at_work(kind, client.url, topic, seen):
        client.produce(topic, "before")
        eventually(lambda: seen == ["before"], timeout_s=PATIENCE_S)
        client.delete_topic(topic)
        eventually(lambda: told(caplog, "trying again from time to time"), timeout_s=PATIENCE_S)
        time.sleep(1.0)  # several tries
        assert told(caplog, "trying again from time to time") == 1
        client.create_topic(topic)
        client.produce(topic, "after")
        eventually(lambda: seen == ["before", "after"], timeout_s=PATIENCE_S)
        assert told(caplog, "connected again") == 1
        eventually(lambda: progress(client, topic).lag == 0)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_worker_that_waits_for_its_topic_stops_promptly(
    client: Client, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"gone-{kind}"
    client.create_topic(topic)
    caplog.set_level(logging.INFO, "penstock.worker")
    with at_work(kind, client.url, topic, []) as stop:
        eventually(lambda: has_consumer(client, topic))
        client.delete_topic(topic)
        eventually(lambda: told(caplog, "trying again from time to time"), timeout_s=PATIENCE_S)
        stop()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_message_whose_topic_is_deleted_while_it_is_handled_does_not_end_the_worker(
    client: Client, kind: str
) -> None:
    topic = f"replaced-{kind}"
    client.create_topic(topic, 2)
    seen: list[str] = []

    class Handling(list[str]):
        def append(self, value: str) -> None:
            if value == "first":
                client.delete_topic(topic)
                client.create_topic(topic)
            seen.append(value)

    with at_work(kind, client.url, topic, Handling()):
        client.produce(topic, "first", envelope=None)
        eventually(lambda: seen == ["first"], timeout_s=PATIENCE_S)
        client.produce(topic, "second")
        eventually(lambda: seen == ["first", "second"], timeout_s=PATIENCE_S)


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_worker_outlives_a_rotated_token(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The token's file is written after the broker has the new token: the worker waits."""
    tokens = ["first"]
    seen: list[str] = []
    caplog.set_level(logging.INFO, "penstock.worker")
    broker = BrokerProcess(tmp_path / "data", env={"PENSTOCK_TOKEN": "first"})
    try:
        broker.start()
        with Client(broker.url, token="first") as client:
            client.create_topic("t")
        with at_work(kind, broker.url, "t", seen, lambda: tokens[0]):
            with Client(broker.url, token="first") as client:
                client.produce("t", "before")
                eventually(lambda: seen == ["before"], timeout_s=PATIENCE_S)
            broker.flags = ("--port", str(broker.port))
            broker.env["PENSTOCK_TOKEN"] = "second"
            broker.restart()
            eventually(lambda: told(caplog, "not the broker's token"), timeout_s=PATIENCE_S)
            time.sleep(1.0)
            assert told(caplog, "not the broker's token") == 1
            tokens[0] = "second"
            with Client(broker.url, token="second") as client:
                client.produce("t", "after")
                eventually(lambda: seen == ["before", "after"], timeout_s=PATIENCE_S)
                eventually(lambda: progress(client, "t").lag == 0)
    finally:
        broker.close()


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_stream_that_the_broker_closes_is_logged_plainly(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP with a new token closes the streams that were opened with the old one."""
    file = tmp_path / "token"
    file.write_text("first")
    seen: list[str] = []
    caplog.set_level(logging.INFO, "penstock.worker")
    broker = BrokerProcess(None, "--token-file", str(file))
    try:
        broker.start()
        assert broker.process is not None
        with Client(broker.url, token=file.read_text) as client:
            client.create_topic("t")
            with at_work(kind, broker.url, "t", seen, file.read_text):
                eventually(lambda: has_consumer(client, "t"), timeout_s=PATIENCE_S)
                file.write_text("second")
                broker.process.send_signal(signal.SIGHUP)
                closed = f"the broker at {broker.url} closed the connection"
                eventually(lambda: told(caplog, closed), timeout_s=PATIENCE_S)
                client.produce("t", "after")
                eventually(lambda: seen == ["after"], timeout_s=PATIENCE_S)
        assert not told(caplog, "chunked read")
    finally:
        broker.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[BrokerProcess]:
    """A broker that asks for a token."""
    with BrokerProcess(None, env={"PENSTOCK_TOKEN": "sesame"}) as broker:
        yield broker


@pytest.mark.parametrize(("token", "error"), [("sesame", NotFound), ("salami", Unauthenticated)])
@pytest.mark.parametrize("work", [_plain, _async])
def test_a_topic_or_token_that_was_never_right_ends_the_run(
    guarded: BrokerProcess, work: Work, token: str, error: type[Exception]
) -> None:
    """A worker reports a misspelt topic at once. It waits only for one that was there."""
    run, _ = work(guarded.url, "nowhere", print, token)
    with pytest.raises(error):
        run()
