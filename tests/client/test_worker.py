"""The worker against a real broker: acks, nacks, extends, effects, and a clean stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.client import Client, Delivery, EffectRef, Envelope, RetryPolicy, Worker
from penstock.model.errors import InvalidArgument, NotFound
from tests.broker_process import BrokerProcess, eventually


@contextmanager
def running(worker: Worker) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()


def lag(client: Client, topic: str, group: str = "g") -> int:
    groups = {each.name: each for each in client.describe_topic(topic).groups}
    if group not in groups:
        return -1
    return sum(each.lag for each in groups[group].partitions)


def test_a_message_is_acked_when_the_handler_returns(client: Client, topic: str) -> None:
    seen: list[str] = []
    for number in range(3):
        client.produce(topic, str(number))
    with running(Worker(client, topic, "g", lambda delivery: seen.append(delivery.value))):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert seen == ["0", "1", "2"]


def test_an_exception_is_a_nack_with_its_text(client: Client, topic: str) -> None:
    errors: list[str] = []

    def handle(delivery: Delivery) -> None:
        errors.append(delivery.last_error)
        if delivery.attempts < 3:
            raise ValueError("not yet")

    client.produce(topic, "v")
    with running(Worker(client, topic, "g", handle)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert errors == ["", "ValueError: not yet", "ValueError: not yet"]


def test_the_last_failure_is_dead_lettered_with_its_reason(client: Client, topic: str) -> None:
    def handle(delivery: Delivery) -> None:
        raise ValueError("never")

    client.produce(topic, "v", envelope=Envelope(retry_policy=RetryPolicy(max_attempts=2)))
    with running(Worker(client, topic, "g", handle)):
        eventually(lambda: f"dlq.{topic}" in client.list_topics())
    dead = next(client.consume(f"dlq.{topic}", "g"))
    assert dead.envelope.dlq is not None
    assert (dead.envelope.dlq.attempts, dead.envelope.dlq.last_error) == (2, "ValueError: never")


def test_the_lease_is_extended_while_the_handler_runs(client: Client, topic: str) -> None:
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempts)
        time.sleep(2.5)

    client.produce(topic, "v")
    with running(Worker(client, topic, "g", handle, lease_ms=2000)):
        eventually(lambda: lag(client, topic), lambda left: left == 0, 60)
    assert attempts == [1]


def test_two_workers_share_the_work(client: Client, topic: str) -> None:
    done: dict[str, list[int]] = {"a": [], "b": []}

    def handle(delivery: Delivery) -> None:
        done[delivery.owner].append(delivery.offset)
        time.sleep(0.01)

    for number in range(20):
        client.produce(topic, str(number))
    with (
        running(Worker(client, topic, "g", handle, owner="a")),
        running(Worker(client, topic, "g", handle, owner="b")),
    ):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert sorted(done["a"] + done["b"]) == list(range(20))
    assert done["a"]
    assert done["b"]


def test_stop_finishes_the_message_under_way_and_takes_no_other(client: Client, topic: str) -> None:
    began, may_end = threading.Event(), threading.Event()

    def handle(delivery: Delivery) -> None:
        began.set()
        assert may_end.wait(10)

    for value in ("first", "second"):
        client.produce(topic, value)
    worker = Worker(client, topic, "g", handle)
    with running(worker):
        assert began.wait(10)
        worker.stop()
        may_end.set()
    group = client.describe_topic(topic).groups[0].partitions[0]
    assert (group.lag, group.in_flight) == (1, 0)


def test_an_idle_worker_stops_soon(client: Client, topic: str) -> None:
    worker = Worker(client, topic, "g", print)
    with running(worker) as thread:
        eventually(lambda: client.describe_topic(topic).groups)
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_a_worker_lives_through_a_restart_of_its_broker(tmp_path: Path) -> None:
    seen: list[str] = []
    broker = BrokerProcess(tmp_path / "data")
    try:
        broker.start().create_topic("t")
        port = str(broker.port)
        client = Client(broker.url)
        with client, running(Worker(client, "t", "g", lambda each: seen.append(each.value))):
            client.produce("t", "before")
            eventually(lambda: lag(client, "t"), lambda left: left == 0)
            broker.kill()
            broker.flags = ("--port", port)
            broker.start()
            client.produce("t", "after")
            eventually(lambda: lag(client, "t"), lambda left: left == 0)
    finally:
        broker.close()
    assert seen == ["before", "after"]


def test_a_topic_that_is_not_there_ends_the_run(client: Client) -> None:
    with pytest.raises(NotFound):
        Worker(client, "nowhere", "g", print).run()


def test_a_coroutine_function_is_refused(client: Client) -> None:
    async def handle(delivery: Delivery) -> None: ...

    with pytest.raises(InvalidArgument):
        Worker(client, "t", "g", handle)


# -- effects -------------------------------------------------------------------------------------


def once(runs: list[str], fails: int = 0) -> Callable[[Delivery], str]:
    def handle(delivery: Delivery) -> str:
        runs.append(delivery.value)
        if len(runs) <= fails:
            raise ValueError("not yet")
        return f"did {delivery.value}"

    return handle


def effect_of(topic: str, key: str, owner: str = "other") -> EffectRef:
    return EffectRef(topic=topic, group="g", key=key, owner=owner)


def test_an_effect_is_committed_with_its_result_before_the_ack(client: Client, topic: str) -> None:
    """driftq-62"""
    runs: list[str] = []
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k"))
    with running(Worker(client, topic, "g", once(runs), effect=True)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    begun = client.begin_effect(effect_of(topic, "k"))
    assert (begun.status, begun.result) == ("COMMITTED", "did v")
    assert runs == ["v"]


def test_a_failed_effect_is_run_again(client: Client, topic: str) -> None:
    runs: list[str] = []
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k"))
    with running(Worker(client, topic, "g", once(runs, fails=2), effect=True)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert runs == ["v"] * 3


def test_a_committed_effect_is_acked_unhandled(client: Client, topic: str) -> None:
    """driftq-62: the worker before us died between its commit and its ack."""
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k"))
    # The message is delivered before the commit, so the broker does not skip it by itself.
    delivery = next(client.consume(topic, "g", owner="other"))
    client.begin_effect(effect_of(topic, "k"))
    client.commit_effect(effect_of(topic, "k"), "did it")
    client.nack(delivery, "died")
    runs: list[str] = []
    with running(Worker(client, topic, "g", once(runs), effect=True)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert runs == []


def test_an_effect_that_another_runs_is_waited_for(client: Client, topic: str) -> None:
    """driftq-62: two workers at once."""
    client.begin_effect(effect_of(topic, "k"), 60_000)
    client.produce(topic, "v", envelope=Envelope(idempotency_key="k"))
    runs: list[str] = []
    with running(Worker(client, topic, "g", once(runs), effect=True, lease_ms=600)):
        eventually(lambda: lag(client, topic), lambda left: left == 1)
        time.sleep(1.0)
        assert (runs, lag(client, topic)) == ([], 1)
        client.commit_effect(effect_of(topic, "k"), "theirs")
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert runs == []


def test_a_message_without_a_key_is_an_effect_of_its_own(client: Client, topic: str) -> None:
    runs: list[str] = []
    for value in ("a", "b"):
        client.produce(topic, value)
    with running(Worker(client, topic, "g", once(runs), effect=True)):
        eventually(lambda: lag(client, topic), lambda left: left == 0)
    assert runs == ["a", "b"]
