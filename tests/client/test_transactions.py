"""Transactions of both clients, and workers whose handlers return messages."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
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
from penstock.client.results import Produced, PublishedAt
from penstock.model.caching import Written
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    VersionMismatch,
)
from tests.broker_process import BrokerProcess, eventually
from tests.client.test_worker import lag, running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """On a disk: durable caches need one."""
    data_dir = tmp_path_factory.mktemp("data")
    process = BrokerProcess(data_dir, env={"PENSTOCK_SEGMENT_BYTES": str(8 * 2**20)})
    try:
        yield process.start()
    finally:
        process.close()
        shutil.rmtree(data_dir)


@pytest.fixture
def results(client: Client, topic: str) -> str:
    """A topic for what is made of the messages of `topic`."""
    name = f"{topic} results"
    client.create_topic(name)
    return name


@pytest.fixture
def cache(client: Client, topic: str) -> str:
    client.create_cache("default", "default", topic, durable=True)
    return topic


def stored(client: Client, topic: str) -> list[str]:
    """Every value in the topic, once its messages have come to rest."""
    count = client.describe_topic(topic).next_offset
    if not count:
        return []
    with client.consume(topic, "reader") as stream:
        found = [next(stream) for _ in range(count)]
    assert client.describe_topic(topic).next_offset == count
    return [delivery.value for delivery in found]


class LosesAnswers(httpx.BaseTransport):
    """Loses the first answers to transactions: the broker did them, the client does not know."""

    def __init__(self, count: int = 1) -> None:
        self.lost = 0
        self._count = count
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._real.handle_request(request)
        if request.url.path == "/v1/transactions" and self.lost < self._count:
            response.read()
            self.lost += 1
            raise httpx.ReadError("the answer was lost", request=request)
        return response

    def close(self) -> None:
        self._real.close()


class AsyncLosesAnswers(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.lost = 0
        self._real = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._real.handle_async_request(request)
        if request.url.path == "/v1/transactions" and not self.lost:
            await response.aread()
            self.lost += 1
            raise httpx.ReadError("the answer was lost", request=request)
        return response

    async def aclose(self) -> None:
        await self._real.aclose()


# -- the clients ---------------------------------------------------------------------------------


def test_a_transaction_is_sent_at_the_end_of_its_block(
    client: Client, topic: str, results: str, cache: str
) -> None:
    client.produce(topic, "in")
    client.produce(topic, "nacked")
    with client.consume(topic, "g") as stream:
        first, second = next(stream), next(stream)
        effect = EffectRef(topic=topic, group="g", key="k", owner="me")
        client.begin_effect(effect)
        with client.transaction() as tx:
            tx.produce(results, "out", key="x", envelope=Envelope(run_id="r"))
            tx.ack(first)
            tx.nack(second, "not now", delay_ms=0)
            tx.commit_effect(effect, "done")
            tx.cache(cache).put("k", "text", ttl_ms=60_000)
            tx.cache(cache).put("bytes", b"\xff", if_not_exists=True)
            tx.cache(cache).incr("n", 3)
            tx.cache(cache).delete("none")
            assert client.describe_topic(results).next_offset == 0, "nothing is sent before"
            assert not tx.is_committed
        assert next(stream).last_error == "not now"
    place, *_ = tx.results
    assert place == Produced(results, 0, 0)
    assert tx.results[1:4] == [None, None, None]
    assert [type(each) for each in tx.results[4:]] == [Written] * 4
    assert [each.number for each in tx.results[6:7]] == [3]  # type: ignore[union-attr]
    assert tx.results[7] == Written(0, deleted=False)
    assert client.look_up_effect(effect).result == "done"
    value = client.cache(cache).get("k")
    assert value is not None
    assert (value.value, value.version) == (b"text", tx.results[4].version)  # type: ignore[union-attr]
    assert stored(client, results) == ["out"]


def test_a_block_that_raises_sends_nothing(client: Client, topic: str) -> None:
    tx = client.transaction()
    tx.produce(topic, "v")
    with pytest.raises(ZeroDivisionError), tx:
        raise ZeroDivisionError
    assert (tx.is_committed, tx.results) == (False, [])
    assert client.describe_topic(topic).next_offset == 0
    with client.transaction() as empty:
        pass
    assert (empty.is_committed, empty.results) == (True, [])


def test_a_refusal_is_raised_with_its_operation(client: Client, topic: str, cache: str) -> None:
    tx = client.transaction()
    tx.produce(topic, "v")
    with pytest.raises(NotFound) as unknown, tx:
        tx.produce("no such topic", "v")
    assert unknown.value.operation == 1
    with pytest.raises(VersionMismatch) as changed, client.transaction() as tx:
        tx.cache(cache).put("k", "v", if_version=7)
    assert changed.value.operation == 0
    assert client.describe_topic(topic).next_offset == 0
    with pytest.raises(NotFound) as alone:
        client.produce("no such topic", "v")
    assert alone.value.operation is None


def test_a_transaction_that_was_sent_takes_no_more_operations(client: Client, topic: str) -> None:
    with client.transaction() as tx:
        tx.produce(topic, "v")
        assert tx.commit() == [Produced(topic, 0, 0)]
        with pytest.raises(InvalidArgument):
            tx.produce(topic, "w")
    assert client.describe_topic(topic).next_offset == 1, "the end of the block sends no more"
    with pytest.raises(TypeError):
        client.transaction().produce(topic, b"bytes")  # type: ignore[arg-type]


def test_after_a_lost_answer_the_transaction_is_sent_again(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    with Client(broker.url, transport=LosesAnswers()) as losing:
        tx = losing.transaction()
        with pytest.raises(Unavailable), tx:
            tx.produce(topic, "v")
        assert not tx.is_committed
        assert tx.commit() == [Produced(topic, 0, 0)]
    assert client.describe_topic(topic).next_offset == 1
    with pytest.raises(FailedPrecondition), client.transaction(tx.transaction_id) as other:
        other.produce(topic, "another")


def test_the_async_client_has_the_same_transactions(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    client.produce(topic, "in")

    async def scenario() -> list[Any]:
        async with AsyncClient(broker.url) as async_client:
            async with async_client.consume(topic, "g") as stream:
                delivery = await anext(stream)
            async with async_client.transaction("mine") as tx:
                tx.ack(delivery)
                tx.produce(topic, "out")
            again = async_client.transaction()
            again.produce(topic, "out")
            again.ack(delivery)
            with pytest.raises(FailedPrecondition):
                await again.commit()
            return tx.results

    assert asyncio.run(scenario()) == [None, Produced(topic, 0, 1)]
    assert client.describe_topic(topic).next_offset == 2


def test_a_transaction_is_in_the_namespace_of_its_client(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    client.create_tenant("acme")
    client.create_namespace("acme", "prod")
    client.create_cache("acme", "prod", "counts", durable=True)
    with Client(broker.url, tenant="acme", namespace="prod") as scoped:
        scoped.create_topic(topic, 3)
        with scoped.transaction() as tx:
            tx.produce(topic, "v")
            tx.cache("counts").incr("n")
        assert scoped.describe_topic(topic).next_offset == 1
        value = scoped.cache("counts").get("n")
    assert value is not None
    assert value.value == b"1"
    assert client.describe_topic(topic).next_offset == 0


# -- events of streams ---------------------------------------------------------------------------


@pytest.fixture
def streams(client: Client, topic: str) -> tuple[str, str]:
    """A stream with the events a and b, and one for results."""
    names = (f"{topic}-in", f"{topic}-out")
    for name in names:
        client.create_stream("default", "default", name, delivery="at_least_once")
    client.stream(names[0]).publish_batch(["a", "b"])
    return names


def events_of(client: Client, stream: str) -> list[bytes]:
    with client.stream(stream).subscribe(start="earliest", wait_s=0.5) as events:
        return [event.payload for event in events]


def test_an_event_is_acked_with_what_was_made_of_it(
    client: Client, streams: tuple[str, str]
) -> None:
    """felix-123."""
    source, target = streams
    with client.stream(source).subscribe(name="n", start="earliest", lease_ms=60_000) as events:
        a, b = next(events), next(events)
        with client.transaction() as tx:
            tx.publish(target, a.payload.upper())
            tx.ack(a)
            tx.nack(b, "not now", delay_ms=0)
        assert tx.results == [PublishedAt(0), None, None]
        again = next(events)
        assert (again.payload, again.last_error) == (b"b", "not now")
        late = client.transaction()
        late.publish(target, "twice")
        late.ack(a)
        with pytest.raises(FailedPrecondition):
            late.commit()
        with client.transaction() as tx:
            tx.publish(target, again.payload.upper())
            tx.ack(again.ref)
    assert events_of(client, target) == [b"A", b"B"]
    with client.stream(source).subscribe(name="n", wait_s=0.5) as events:
        assert list(events) == []


def test_the_async_client_acks_events_in_transactions_too(
    broker: BrokerProcess, client: Client, streams: tuple[str, str]
) -> None:
    source, target = streams

    async def scenario() -> None:
        async with AsyncClient(broker.url) as async_client:
            subscription = async_client.stream(source).subscribe(name="n", start="earliest")
            async with subscription as events:
                event = await anext(events)
                async with async_client.transaction() as tx:
                    tx.publish(target, event.payload.upper())
                    tx.ack(event)
                again = async_client.transaction()
                again.publish(target, "twice")
                again.ack(event)
                with pytest.raises(FailedPrecondition):
                    await again.commit()

    asyncio.run(scenario())
    assert events_of(client, target) == [b"A"]


def test_an_event_that_cannot_be_acked_in_the_transaction_is_refused_at_once(
    broker: BrokerProcess, client: Client, streams: tuple[str, str]
) -> None:
    """Before anything is sent: another stream of the same name must not be acked by mistake."""
    source, _ = streams
    with client.stream(source).subscribe(start="earliest") as unnamed:
        event = next(unnamed)
        with pytest.raises(InvalidArgument, match="with a name"):
            client.transaction().ack(event)
    with client.stream(source).subscribe(name="n", start="earliest") as named:
        event = next(named)
        with pytest.raises(InvalidArgument, match="no dead letters"):
            client.transaction().nack(event, dead=True)
        with Client(broker.url, tenant="acme", namespace="other") as elsewhere:
            with pytest.raises(InvalidArgument, match="'default/default'"):
                elsewhere.transaction().ack(event)
            with pytest.raises(InvalidArgument, match="'acme/other'"):
                elsewhere.transaction().nack(event)


def test_a_repeated_publish_of_a_transaction_has_its_first_offset(
    client: Client, streams: tuple[str, str]
) -> None:
    """felix-122."""
    _, target = streams
    for expected in (PublishedAt(0), PublishedAt(0, duplicate=True)):
        with client.transaction() as tx:
            tx.publish(target, "a", "b", producer_id="p", sequence=0)
        assert tx.results == [expected]


# -- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [False, True])
def test_the_messages_that_a_handler_returns_are_stored_with_the_ack(
    client: Client, topic: str, results: str, effect: bool
) -> None:
    returns: list[object] = [
        NewMessage(results, "one"),
        [NewMessage(results, "two"), NewMessage(results, "three", key="k")],
        (NewMessage(results, "four"),),
        [],
        None,
        "text",
        ["text", 5],
    ]
    for number in range(len(returns)):
        client.produce(topic, str(number))
    worker = Worker(
        client, topic, "g", lambda delivery: returns[int(delivery.value)], effect=effect
    )
    with running(worker):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert stored(client, results) == ["one", "two", "three", "four"]
    if effect:
        done = [
            client.look_up_effect(EffectRef(topic=topic, group="g", key=f"offset-{n}"))
            for n in range(len(returns))
        ]
        assert {each.status for each in done} == {"COMMITTED"}
        assert done[5].result == "text"


@pytest.mark.parametrize("effect", [False, True])
def test_a_lost_answer_doubles_no_result(
    broker: BrokerProcess,
    client: Client,
    topic: str,
    results: str,
    effect: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The repeat is known by its id, and is a success."""
    client.produce(topic, "in")
    handled: list[int] = []

    def handle(delivery: Delivery) -> NewMessage:
        handled.append(delivery.attempts)
        return NewMessage(results, "out")

    transport = LosesAnswers(2)
    with Client(broker.url, transport=transport) as losing:
        worker = Worker(losing, topic, "g", handle, effect=effect)
        with running(worker):
            eventually(lambda: transport.lost, lambda lost: lost == 2)
            eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert handled == [1]
    assert stored(client, results) == ["out"]
    assert "was not settled" not in caplog.text


def test_results_that_are_refused_are_a_failed_attempt(
    client: Client, topic: str, results: str
) -> None:
    """The message comes again, and after its last attempt it is a dead letter with the reason."""
    client.produce(topic, "v", envelope=Envelope(retry_policy=RetryPolicy(max_attempts=2)))

    def handle(delivery: Delivery) -> list[NewMessage]:
        return [NewMessage(results, "v"), NewMessage("no such topic", "v")]

    with running(Worker(client, topic, "g", handle)):
        eventually(lambda: f"dlq.{topic}" in client.list_topics())
    dead = next(client.consume(f"dlq.{topic}", "g"))
    assert dead.envelope.dlq is not None
    assert dead.envelope.dlq.attempts == 2
    assert "its results were refused: operation 2: unknown topic" in dead.envelope.dlq.last_error
    assert stored(client, results) == []


async def waits() -> None: ...


LOSING: list[tuple[Callable[[str], object], str]] = [
    (lambda topic: [NewMessage(topic, "v"), "text"], "a list with messages and other things in it"),
    (lambda topic: (NewMessage(topic, each) for each in "ab"), "a generator, which is not run"),
    (lambda topic: map(partial(NewMessage, topic), "ab"), "a map, which is not run"),
    (lambda topic: deque([NewMessage(topic, "v")]), "a deque of messages"),
    (lambda topic: {NewMessage(topic, "v")}, "a set of messages"),
    (lambda topic: {"v": NewMessage(topic, "v")}, "a dict of messages"),
    (lambda topic: waits(), "a coroutine that nobody awaits"),
]


@pytest.mark.parametrize(("make", "reason"), LOSING)
def test_a_result_that_would_lose_messages_is_a_failed_attempt(
    client: Client, topic: str, results: str, make: Callable[[str], object], reason: str
) -> None:
    client.produce(topic, "v", envelope=Envelope(retry_policy=RetryPolicy(max_attempts=1)))
    with running(Worker(client, topic, "g", lambda _: make(results))):
        eventually(lambda: f"dlq.{topic}" in client.list_topics())
    dead = next(client.consume(f"dlq.{topic}", "g"))
    assert dead.envelope.dlq is not None
    assert f"TypeError: a handler returned {reason}" in dead.envelope.dlq.last_error
    assert stored(client, results) == []


def test_a_generator_from_an_async_handler_is_a_failed_attempt(
    broker: BrokerProcess, client: Client, topic: str, results: str
) -> None:
    client.produce(topic, "v", envelope=Envelope(retry_policy=RetryPolicy(max_attempts=1)))

    async def handle(delivery: Delivery) -> object:
        return (NewMessage(results, each) for each in "ab")

    with running_async(broker.url, AsyncLosesAnswers(), topic, "g", handle):
        eventually(lambda: f"dlq.{topic}" in client.list_topics())
    dead = next(client.consume(f"dlq.{topic}", "g"))
    assert dead.envelope.dlq is not None
    assert "return a list of messages" in dead.envelope.dlq.last_error


def test_a_handler_that_yields_is_refused_when_its_worker_is_made(client: Client) -> None:
    """Calling a generator function runs nothing of it, so its message would be acked unhandled."""

    def yields(delivery: Delivery) -> Iterator[NewMessage]:
        yield NewMessage("t", delivery.value)

    async def async_yields(delivery: Delivery) -> AsyncIterator[NewMessage]:
        yield NewMessage("t", delivery.value)

    class Yields:
        def __call__(self, delivery: Delivery) -> Iterator[NewMessage]:
            return self.method(delivery)

        def method(self, delivery: Delivery) -> Iterator[NewMessage]:
            yield NewMessage("t", delivery.value)

    class CallYields(Yields):
        def __call__(self, delivery: Delivery) -> Iterator[NewMessage]:
            yield NewMessage("t", delivery.value)

    for handler in (yields, async_yields, partial(yields), Yields().method, CallYields()):
        for kind in (Worker, AsyncWorker):
            with pytest.raises(InvalidArgument, match=r"cannot yield.* Return a list"):
                kind(client, "t", "g", handler)  # type: ignore[arg-type]


def test_a_worker_whose_message_was_finished_elsewhere_stores_nothing(
    client: Client, topic: str, results: str
) -> None:
    client.produce(topic, "finished elsewhere")
    client.produce(topic, "next")

    def handle(delivery: Delivery) -> NewMessage:
        if delivery.value != "next":
            client.ack(delivery)
        return NewMessage(results, delivery.value)

    with running(Worker(client, topic, "g", handle)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert stored(client, results) == ["next"]


@contextmanager
def running_async(url: str, transport: AsyncLosesAnswers, *args: Any) -> Iterator[None]:
    ready = threading.Event()
    stops: list[Any] = []

    async def scenario() -> None:
        async with AsyncClient(url, transport=transport) as client:
            worker = AsyncWorker(client, *args, concurrency=4)
            loop = asyncio.get_running_loop()
            stops.append(lambda: loop.call_soon_threadsafe(worker.stop))
            ready.set()
            await worker.run()

    thread = threading.Thread(target=lambda: asyncio.run(scenario()))
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        stops[0]()
        thread.join(10)
        assert not thread.is_alive()


def test_an_async_worker_stores_results_once_too(
    broker: BrokerProcess, client: Client, topic: str, results: str
) -> None:
    for number in range(20):
        client.produce(topic, str(number))

    async def handle(delivery: Delivery) -> list[NewMessage]:
        return [NewMessage(results, delivery.value)]

    transport = AsyncLosesAnswers()
    with running_async(broker.url, transport, topic, "g", handle):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert transport.lost
    assert sorted(stored(client, results), key=int) == [str(number) for number in range(20)]
