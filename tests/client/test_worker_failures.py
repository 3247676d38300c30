"""What a handler raises on purpose: Reject buries the message, RetryLater says when it returns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from penstock.client import (
    AsyncClient,
    AsyncWorker,
    Client,
    Delivery,
    EffectRef,
    Envelope,
    Reject,
    RetryLater,
    RetryPolicy,
    Worker,
)
from penstock.client.calls import Call
from penstock.model.errors import InvalidArgument
from tests.broker_process import eventually
from tests.client.test_async_worker import running as running_async
from tests.client.test_worker import lag, running
from tests.client.test_worker_stop import T

KINDS = pytest.mark.parametrize("kind", ["plain", "async"])


def work(
    client: Client, kind: str, topic: str, handle: Callable[[Delivery], object], effect: bool
) -> None:
    """A worker of this kind, until everything is done."""

    def done() -> None:
        eventually(lambda: lag(client, topic) == 0, timeout_s=30)

    async def each(delivery: Delivery) -> object:
        return handle(delivery)

    async def scenario() -> None:
        async with (
            AsyncClient(client.url) as mine,
            running_async(AsyncWorker(mine, topic, "g", each, effect=effect)),
        ):
            await asyncio.to_thread(done)

    if kind == "async":
        asyncio.run(scenario())
    else:
        with running(Worker(client, topic, "g", handle, effect=effect)):
            done()


@KINDS
@pytest.mark.parametrize("effect", [False, True])
def test_a_rejected_message_is_a_dead_letter_at_once(
    client: Client, topic: str, kind: str, effect: bool
) -> None:
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempts)
        raise Reject("no amount")

    policy = RetryPolicy(max_attempts=100, backoff_ms=60_000)
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k", retry_policy=policy))
    work(client, kind, topic, handle, effect)
    assert attempts == [1]
    dead = next(client.consume(f"dlq.{topic}", "g", wait_s=10))
    assert dead.envelope.dlq is not None
    assert (dead.envelope.dlq.attempts, dead.envelope.dlq.last_error) == (1, "no amount")
    if effect:
        ref = EffectRef(topic=topic, group="g", key="k", owner="other")
        assert client.begin_effect(ref).status == "RUN"


@KINDS
@pytest.mark.parametrize("effect", [False, True])
def test_retry_later_says_when_the_message_comes_again(
    client: Client, topic: str, kind: str, effect: bool
) -> None:
    """Sooner than its policy says, and not before the delay."""
    seen: list[tuple[int, str]] = []
    moments: list[float] = []

    def handle(delivery: Delivery) -> None:
        seen.append((delivery.attempts, delivery.last_error))
        moments.append(time.monotonic())
        if delivery.attempts == 1:
            raise RetryLater(delay_ms=400, reason="closed")

    policy = RetryPolicy(max_attempts=3, backoff_ms=60_000, max_backoff_ms=60_000)
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k", retry_policy=policy))
    work(client, kind, topic, handle, effect)
    assert seen == [(1, ""), (2, "closed")]
    assert moments[1] - moments[0] >= 0.4


@KINDS
def test_a_delay_of_0_means_at_once(client: Client, topic: str, kind: str) -> None:
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.last_error)
        if delivery.attempts == 1:
            raise RetryLater(0)

    policy = RetryPolicy(max_attempts=3, backoff_ms=60_000, max_backoff_ms=60_000)
    client.produce(topic, "v", envelope=Envelope(retry_policy=policy))
    work(client, kind, topic, handle, effect=False)
    assert seen == ["", "retry later"]


@pytest.mark.parametrize("delay_ms", [-1, 1.5, True, None, "5", 24 * 3600 * 1000 + 1])
def test_a_delay_that_is_none_is_refused_where_it_is_written(delay_ms: object) -> None:
    with pytest.raises(ValueError, match="delay_ms must be a whole number"):
        RetryLater(delay_ms)  # type: ignore[arg-type]


def test_the_longest_delay_is_what_the_broker_takes(client: Client, topic: str) -> None:
    longest = RetryLater(24 * 3600 * 1000)
    client.produce(topic, "v")
    delivery = next(client.consume(topic, "g", wait_s=10))
    client.nack(delivery, delay_ms=longest.delay_ms)


@KINDS
def test_a_rejected_dead_letter_is_nacked_with_the_reason(
    client: Client, topic: str, kind: str
) -> None:
    """driftq-40: a dead-letter topic has no dead letters of its own."""
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.last_error)
        if len(seen) == 1:
            raise Reject("nobody wants it")

    client.produce(topic, "v")
    client.nack(next(client.consume(topic, "g", wait_s=10)), "broken", dead=True)
    work(client, kind, f"dlq.{topic}", handle, effect=False)
    assert seen == ["", "nobody wants it"]
    assert f"dlq.dlq.{topic}" not in client.list_topics()


class OlderClient(Client):
    """Of a broker whose nack knows neither `delay_ms` nor `dead`."""

    def send(self, call: Call[T]) -> T:
        if call.path == "/v1/nack" and (b"dead" in call.body or b"delay_ms" in call.body):
            raise InvalidArgument("unknown field")
        return super().send(call)


def test_with_an_older_broker_the_policy_decides(client: Client, topic: str) -> None:
    def handle(delivery: Delivery) -> None:
        if delivery.attempts == 1:
            raise Reject("no amount")

    client.produce(topic, "v")
    with OlderClient(client.url) as mine, running(Worker(mine, topic, "g", handle)):
        eventually(lambda: lag(client, topic) == 0, timeout_s=30)
    assert f"dlq.{topic}" not in client.list_topics()
