"""Sending a dead letter to its topic again, with both clients."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from penstock.client import AsyncClient, Client, Delivery, Envelope, RetryPolicy
from penstock.client.calls import Call
from penstock.client.results import Produced
from penstock.model.errors import InvalidArgument, Unavailable
from tests.client.test_worker import lag
from tests.client.test_worker_stop import T

KINDS = pytest.mark.parametrize("kind", ["plain", "async"])


def redrive(kind: str, client: Client, letter: Delivery) -> Produced:
    async def scenario() -> Produced:
        async with AsyncClient(client.url) as mine:
            return await mine.redrive(letter)

    return client.redrive(letter) if kind == "plain" else asyncio.run(scenario())


def buried(client: Client, topic: str, envelope: Envelope | None = None) -> Delivery:
    """The dead letter of a message that is produced and given up."""
    client.produce(topic, "v", key="k", envelope=envelope)
    client.nack(next(client.consume(topic, "g", wait_s=10)), "broken", dead=True)
    return next(client.consume(f"dlq.{topic}", "people", wait_s=10))


@KINDS
def test_a_dead_letter_goes_back_with_its_envelope_and_is_acked(
    client: Client, topic: str, kind: str
) -> None:
    policy = RetryPolicy(max_attempts=7, backoff_ms=10)
    envelope = Envelope(run_id="r", tenant_id="t", idempotency_key="once", retry_policy=policy)
    produced = redrive(kind, client, buried(client, topic, envelope))
    assert (produced.topic, produced.duplicate) == (topic, False)
    assert lag(client, f"dlq.{topic}", "people") == 0
    again = next(client.consume(topic, "g", wait_s=10))
    assert (again.value, again.key, again.attempts) == ("v", "k", 1)
    found = again.envelope
    assert (found.run_id, found.tenant_id, found.retry_policy) == ("r", "t", policy)
    assert found.dlq is None


@pytest.mark.parametrize("seconds", [0, 3600])
@KINDS
def test_only_a_deadline_that_has_passed_is_left_out(
    client: Client, topic: str, kind: str, seconds: int
) -> None:
    """The broker would refuse it, and the dead letter could never be sent again."""
    deadline = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
    letter = buried(client, topic)
    letter = msgspec.structs.replace(
        letter, envelope=msgspec.structs.replace(letter.envelope, deadline=deadline)
    )
    redrive(kind, client, letter)
    again = next(client.consume(topic, "g", wait_s=10))
    assert bool(again.envelope.deadline) == bool(seconds)


@KINDS
def test_a_message_that_dies_again_can_be_redriven_again(
    client: Client, topic: str, kind: str
) -> None:
    redrive(kind, client, buried(client, topic))
    client.nack(next(client.consume(topic, "g", wait_s=10)), "still broken", dead=True)
    letter = next(client.consume(f"dlq.{topic}", "people", wait_s=10))
    assert not redrive(kind, client, letter).duplicate
    assert lag(client, topic) == 1


class LosesAcks(Client):
    def send(self, call: Call[T]) -> T:
        if call.path == "/v1/ack":
            raise Unavailable("the connection broke")
        return super().send(call)


@KINDS
def test_a_redrive_that_is_repeated_stores_nothing_twice(
    client: Client, topic: str, kind: str
) -> None:
    letter = buried(client, topic)
    with LosesAcks(client.url) as mine, pytest.raises(Unavailable):
        mine.redrive(letter)
    assert redrive(kind, client, letter).duplicate
    assert lag(client, topic) == 1
    assert lag(client, f"dlq.{topic}", "people") == 0


@KINDS
def test_what_is_no_dead_letter_is_not_redriven(client: Client, topic: str, kind: str) -> None:
    client.produce(topic, "v")
    delivery = next(client.consume(topic, "g", wait_s=10))
    with pytest.raises(InvalidArgument, match="is no dead letter"):
        redrive(kind, client, delivery)
