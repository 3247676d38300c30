"""Streams through both clients, against a real broker."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.client import AsyncClient, Client
from penstock.client.sync_feeds import Subscription
from penstock.client.sync_handles import StreamHandle
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    TooLarge,
    Unavailable,
)
from tests.broker_process import BrokerProcess, eventually

BINARY = bytes(range(256))
WAIT_S = 10.0
"""So that what does not come fails a test instead of holding it up."""


@pytest.fixture
def stream(client: Client, request: pytest.FixtureRequest) -> StreamHandle:
    """A stream of the test's own."""
    name: str = request.node.name
    client.create_stream("default", "default", name)
    return client.stream(name)


@pytest.fixture
def own_broker() -> Iterator[BrokerProcess]:
    """One that may be killed."""
    with BrokerProcess(None) as broker:
        yield broker


def received(subscription: Subscription, count: int) -> list[bytes]:
    return [next(subscription) for _ in range(count)]


def test_events_go_to_every_subscriber_in_their_order(stream: StreamHandle) -> None:
    """felix-128: and felix-38, a batch is one step."""
    with stream.subscribe(wait_s=WAIT_S) as one, stream.subscribe(wait_s=WAIT_S) as two:
        assert one.subscription_id != two.subscription_id
        stream.publish_batch(["msg1", "msg2", "msg3"], ack="per_batch")
        stream.publish("msg4", ack="none")
        for subscription in (one, two):
            assert received(subscription, 4) == [b"msg1", b"msg2", b"msg3", b"msg4"]


def test_a_subscriber_sees_nothing_from_before_it_subscribed(stream: StreamHandle) -> None:
    """felix-45: it begins when it is opened, and from then on misses nothing."""
    stream.publish("before")
    subscription = stream.subscribe(wait_s=WAIT_S)
    stream.publish("made but not open")
    with subscription:
        stream.publish("after")
        assert next(subscription) == b"after"


def test_payloads_are_bytes_of_any_kind(stream: StreamHandle) -> None:
    payloads = [BINARY, b"", b"\n", "ü\u2028".encode(), b"x" * 1_000_000]
    with stream.subscribe(wait_s=WAIT_S) as subscription:
        stream.publish_batch(payloads)
        for payload in payloads:
            stream.publish(payload)
        assert received(subscription, 10) == payloads + payloads


def test_a_refused_publish_says_why_and_publishes_nothing(
    client: Client, stream: StreamHandle
) -> None:
    """felix-84, 87, 88, 92."""
    unknown = {
        "unknown tenant 'x'": client.stream("s", tenant_id="x"),
        "unknown namespace 'y'": client.stream("s", namespace="y"),
        "stream not found": client.stream("nowhere"),
    }
    for text, handle in unknown.items():
        for ask in (handle.subscriptions, handle.subscribe().open, lambda h=handle: h.publish("v")):
            with pytest.raises(NotFound, match=text):
                ask()
    with stream.subscribe(wait_s=0.3) as subscription:
        with pytest.raises(TooLarge, match="max_message_bytes"):
            stream.publish(b"x" * (8 * 2**20 + 1))
        with pytest.raises(NotFound):
            stream.publish("v", invalidate=["cache:nowhere:k"])
        with pytest.raises(InvalidArgument):
            stream.publish("v", invalidate=["nonsense"])
        with pytest.raises(InvalidArgument):
            stream.publish_batch([])
        assert list(subscription) == []


def test_lag_is_that_of_the_subscription_that_asks(stream: StreamHandle) -> None:
    """felix-115"""
    with (
        stream.subscribe(wait_s=WAIT_S) as one,
        stream.subscribe(event_queue_depth=7, wait_s=WAIT_S) as two,
    ):
        stream.publish("v")
        assert received(one, 1) == received(two, 1)
        lag = two.lag()
        assert (lag.subscription_id, lag.event_queue_depth) == (two.subscription_id, 7)
        assert (lag.messages_behind, lag.dropped, lag.delivered) == (0, 0, 1)
        listed = {each.subscription_id for each in stream.subscriptions()}
        assert listed == {one.subscription_id, two.subscription_id}
        assert one.lag().event_queue_depth == 1024


def test_closing_ends_the_iteration_and_the_subscription(stream: StreamHandle) -> None:
    """felix-41: also of what was read and not yet taken."""
    with stream.subscribe(wait_s=WAIT_S) as subscription:
        stream.publish_batch(["1", "2", "3"])
        seen = []
        for payload in subscription:
            seen.append(payload)
            subscription.close()
    assert seen == [b"1"]
    assert subscription.ended
    assert not subscription.timed_out
    eventually(stream.subscriptions, lambda found: not found)
    with pytest.raises(NotFound, match="ended"):
        subscription.lag()


def test_another_thread_may_close_a_subscription_that_waits(stream: StreamHandle) -> None:
    """At once, and without an error: a program must be able to stop."""
    subscription = stream.subscribe().open()
    seen: list[bytes | PenstockError] = []

    def read() -> None:
        try:
            seen.extend(subscription)
        except PenstockError as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    stream.publish("v")
    eventually(lambda: list(seen), lambda found: found == [b"v"])
    subscription.close()
    reader.join(10)
    assert not reader.is_alive()
    assert seen == [b"v"]


def test_wait_s_ends_the_iteration_in_time(stream: StreamHandle) -> None:
    with stream.subscribe(wait_s=0.3) as subscription:
        stream.publish("v")
        started = time.monotonic()
        assert list(subscription) == [b"v"]
        assert 0.3 <= time.monotonic() - started < WAIT_S
        assert subscription.timed_out


def test_an_idle_subscription_outlives_the_timeout(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    with Client(broker.url, timeout_s=0.25) as client:
        subscription = client.stream(stream.path[2]).subscribe(wait_s=1.0)
        assert list(subscription) == []
        assert subscription.timed_out


def test_a_deleted_stream_ends_its_subscriptions_with_an_error(
    client: Client, stream: StreamHandle
) -> None:
    with stream.subscribe(wait_s=WAIT_S) as subscription:
        stream.publish("last")
        client.delete_stream(*stream.path)
        assert next(subscription) == b"last"
        with pytest.raises(NotFound, match="was deleted"):
            next(subscription)
        assert subscription.ended


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_restart_is_seen_as_a_lost_connection(own_broker: BrokerProcess, kill: bool) -> None:
    """felix-49, 50: and after it nothing comes from before."""
    with Client(own_broker.url) as client:
        subscription = client.stream("default").subscribe(wait_s=WAIT_S).open()
        watch = client.cache("default").watch(prefix="", wait_s=WAIT_S).open()
        own_broker.restart(kill=kill)
        for feed in (subscription, watch):
            with pytest.raises(Unavailable) as failure:
                next(feed)
            assert failure.value.retryable
            assert feed.ended
            assert list(feed) == []
    with (
        Client(own_broker.url) as client,
        client.stream("default").subscribe(wait_s=WAIT_S) as again,
    ):
        client.stream("default").publish("new")
        assert next(again) == b"new"


def test_a_broker_that_falls_silent_is_a_lost_connection() -> None:
    """felix-104: the connection stays, and not even a heartbeat comes over it."""
    with Silent() as silent, Client(silent.url, timeout_s=0.2) as client:
        # Of heartbeats every 100 ms, three are missing after 300.
        subscription = client.stream("default").subscribe(wait_s=0.4).open()
        with pytest.raises(Unavailable, match="in time"):
            next(subscription)
        assert not subscription.timed_out


class Silent:
    """A broker that opens a feed and then says nothing."""

    HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    LINE = b'{"type":"subscribed","subscription_id":"s1"}\n'

    def __enter__(self) -> Silent:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()
        return self

    def _answer(self) -> None:
        self._connection, _ = self._listener.accept()
        self._connection.recv(65536)
        self._connection.sendall(self.HEAD + b"%x\r\n%b\r\n" % (len(self.LINE), self.LINE))

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._connection.close()
        self._listener.close()


def test_a_slow_subscriber_loses_the_newest_and_can_read_how_many(client: Client) -> None:
    """felix-4, 20, 21, 115: the events themselves do not say so."""
    client.create_stream("default", "default", "slow", event_queue_depth=4)
    stream = client.stream("slow")
    payloads = [b"%07d" % number + b"x" * 1_000_000 for number in range(40)]
    with stream.subscribe(wait_s=1.0) as subscription:
        for payload in payloads:
            stream.publish(payload)
        dropped = subscription.lag().dropped
        assert dropped > 0
        seen = [payload[:7] for payload in subscription]
    assert len(seen) == len(payloads) - dropped
    assert seen == [payload[:7] for payload in payloads][: len(seen)]


# -- the async client ----------------------------------------------------------------------------


def test_the_async_client_publishes_and_subscribes(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            handle = client.stream(stream.path[2])
            await handle.publish("before")
            async with handle.subscribe(wait_s=0.3) as one, handle.subscribe(wait_s=WAIT_S) as two:
                assert one.subscription_id != two.subscription_id
                await handle.publish_batch([BINARY, "two"])
                assert [await anext(two), await anext(two)] == [BINARY, b"two"]
                assert [payload async for payload in one] == [BINARY, b"two"]
                assert one.timed_out
                assert (await two.lag()).delivered == 2
                assert two.subscription_id in {
                    each.subscription_id for each in await handle.subscriptions()
                }
            assert two.ended
            with pytest.raises(NotFound, match="stream not found"):
                await client.stream("nowhere").subscribe().open()

    asyncio.run(scenario())


def test_an_async_subscription_that_waits_can_be_cancelled(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    async def read(client: AsyncClient) -> None:
        async with client.stream(stream.path[2]).subscribe(wait_s=WAIT_S) as subscription:
            async for _ in subscription:
                pass

    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            reader = asyncio.create_task(read(client))
            await asyncio.to_thread(eventually, stream.subscriptions)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    asyncio.run(scenario())
    eventually(stream.subscriptions, lambda found: not found)


def test_another_task_may_close_an_async_subscription_that_waits(
    broker: BrokerProcess, stream: StreamHandle
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            subscription = await client.stream(stream.path[2]).subscribe().open()
            waiting = asyncio.create_task(anext(subscription, None))
            await asyncio.sleep(0.05)
            await subscription.close()
            assert await asyncio.wait_for(waiting, WAIT_S) is None

    asyncio.run(scenario())
    eventually(stream.subscriptions, lambda found: not found)


def test_a_restart_is_seen_by_the_async_client_too(own_broker: BrokerProcess) -> None:
    """felix-49"""

    async def scenario() -> None:
        async with (
            AsyncClient(own_broker.url) as client,
            client.stream("default").subscribe(wait_s=WAIT_S) as subscription,
        ):
            await asyncio.to_thread(own_broker.kill)
            with pytest.raises(Unavailable):
                await anext(subscription)
            assert subscription.ended
            with pytest.raises(StopAsyncIteration):
                await anext(subscription)

    asyncio.run(scenario())
