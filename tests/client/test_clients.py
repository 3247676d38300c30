"""Both clients against a real broker: the same operations, awaited or not."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.client import (
    AsyncClient,
    Client,
    DeliveryRef,
    EffectRef,
    Envelope,
    NewMessage,
    RetryPolicy,
    registry,
    requests,
)
from penstock.client.calls import Call
from penstock.client.results import Begun, EffectStatus, Produced
from penstock.model.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from tests.broker_process import SOURCE, BrokerProcess


def test_a_message_goes_all_the_way(client: Client, topic: str) -> None:
    policy = RetryPolicy(max_attempts=3)
    envelope = Envelope(run_id="r", tenant_id="t", partition_override=0, retry_policy=policy)
    assert client.produce(topic, "a\u2028b", key="k", envelope=envelope).topic == topic
    with client.consume(topic, "g", owner="me") as stream:
        delivery = next(stream)
        assert (delivery.value, delivery.key, delivery.envelope) == ("a\u2028b", "k", envelope)
        assert (delivery.topic, delivery.group, delivery.owner) == (topic, "g", "me")
        client.extend(delivery, 60_000)
        client.nack(delivery, "not now")
        again = next(stream)
        assert (again.attempts, again.last_error) == (2, "not now")
        with pytest.raises(FailedPrecondition):
            client.ack(delivery)  # its delivery_id is of the attempt before
        client.ack(again)
    assert list(client.consume(topic, "g", wait_s=0.2)) == []


def test_a_produce_says_where_the_message_is(client: Client, topic: str) -> None:
    client.create_topic(f"{topic}.wide", 4)
    wide = f"{topic}.wide"
    assert client.produce(topic, "a") == Produced(topic, 0, 0)
    assert client.produce(topic, "b") == Produced(topic, 0, 1)
    routed = Envelope(target_topic=wide, partition_override=3)
    assert client.produce(topic, "c", envelope=routed) == Produced(topic, 3, 0)

    async def scenario() -> Produced:
        async with AsyncClient(client.url) as mine:
            return await mine.produce(topic, "d")

    assert asyncio.run(scenario()) == Produced(topic, 0, 2)


def test_a_produce_of_a_known_idempotency_key_is_a_duplicate(client: Client, topic: str) -> None:
    keyed = Envelope(idempotency_key="k")
    assert client.produce(topic, "v", envelope=keyed) == Produced(topic, 0, 0)
    assert client.produce(topic, "v", envelope=keyed) == Produced(topic, duplicate=True)


def test_bytes_are_refused_before_anything_is_sent(client: Client, topic: str) -> None:
    data: Any = b"bytes"
    with pytest.raises(TypeError, match="value must be str, not bytes"):
        client.produce(topic, data)

    async def scenario() -> None:
        async with AsyncClient(client.url) as mine:
            with pytest.raises(TypeError, match="value must be str, not bytes"):
                await mine.produce(topic, data)

    asyncio.run(scenario())
    assert client.describe_topic(topic).next_offset == 0


def test_the_items_of_a_batch_stand_or_fall_alone(client: Client, topic: str) -> None:
    good, bad = client.produce_batch([NewMessage(topic, "v"), NewMessage("nowhere", "v")])
    assert not isinstance(good, PenstockError)
    assert (good.partition, good.offset) == (0, 0)
    assert isinstance(bad, NotFound)
    delivery = next(client.consume(topic, "g"))
    other = DeliveryRef(topic=topic, group="g", partition=0, offset=99, owner="me")
    acked, refused = client.ack_batch([delivery, other])
    assert acked is None
    assert isinstance(refused, FailedPrecondition)


def test_what_is_released_comes_again_uncounted(client: Client, topic: str) -> None:
    client.produce_batch([NewMessage(topic, value) for value in "abc"])
    with client.consume(topic, "g", owner="me") as stream:
        a, b, c = (next(stream) for _ in range(3))
    client.release(b)
    other = DeliveryRef(topic=topic, group="g", partition=0, offset=99, owner="me")
    released, gone, refused = client.release_batch([a, b, other])
    assert released is None
    assert isinstance(gone, FailedPrecondition)
    assert isinstance(refused, FailedPrecondition)
    client.ack(c)
    again = list(client.consume(topic, "g", wait_s=0.2))
    assert [(delivery.value, delivery.attempts) for delivery in again] == [("a", 1), ("b", 1)]
    with pytest.raises(FailedPrecondition):
        client.ack(a)  # its delivery_id is that of the released delivery


def test_a_nack_may_name_its_delay_or_give_a_message_up(client: Client, topic: str) -> None:
    client.produce(topic, "v", envelope=Envelope(retry_policy=RetryPolicy(9, 60_000)))
    with client.consume(topic, "g", owner="me") as stream:
        client.nack(next(stream), delay_ms=0)
        again = next(stream)
        assert again.attempts == 2
        client.nack(again, "hopeless", dead=True)
    letter = next(client.consume(f"dlq.{topic}", "g"))
    assert letter.envelope.dlq is not None
    assert letter.envelope.dlq.last_error == "hopeless"
    assert letter.envelope.dlq.retry_policy == RetryPolicy(9, 60_000)


def test_topics_are_described_configured_and_deleted(client: Client) -> None:
    assert client.create_topic("life", 2).status == "created"
    assert client.create_topic("life", 2).status == "exists"
    client.configure_topic("life", retention_ms=60_000)
    client.configure_topic("life", after_archive=True, max_attempts=7, retry_backoff_ms=80)
    with client.consume("life", "g"):
        described = client.describe_topic("life")
    assert (described.retention_ms, len(described.partitions)) == (60_000, 2)
    assert described.after_archive
    assert (described.max_attempts, described.retry_backoff_ms) == (7, 80)
    with pytest.raises(FailedPrecondition, match="after_archive"):
        client.create_topic("life", 2, after_archive=False)
    assert described.groups[0].name == "g"
    client.delete_group("life", "g")
    assert client.describe_topic("life").groups == []
    client.delete_topic("life")
    assert "life" not in client.list_topics()
    with pytest.raises(NotFound):
        client.describe_topic("life")


def test_an_effect_is_begun_renewed_failed_and_committed(client: Client, topic: str) -> None:
    effect = EffectRef(topic=topic, group="g", key="k", owner="me")
    theirs = EffectRef(topic=topic, group="g", key="k", owner="they")
    assert client.begin_effect(effect) == Begun("RUN")
    with pytest.raises(FailedPrecondition):
        client.begin_effect(theirs)
    client.renew_effect(effect)
    client.fail_effect(effect, "no")
    failed = client.look_up_effect(EffectRef(topic=topic, group="g", key="k"))
    assert failed == EffectStatus("FAILED", "me", 0, "", "no")
    assert client.begin_effect(theirs) == Begun("RUN", last_error="no")
    client.commit_effect(theirs, "done")
    with pytest.raises(NotFound):
        client.look_up_effect(msgspec.structs.replace(effect, tenant_id="another"))
    assert client.begin_effect(effect) == Begun("COMMITTED", "done")


def test_tenants_and_namespaces_come_and_go(client: Client) -> None:
    assert client.create_tenant("acme").tenant_id == "acme"
    assert client.create_namespace("acme", "prod").namespace == "prod"
    assert client.describe_tenant("acme") in client.list_tenants()
    assert client.list_namespaces("acme") == [client.describe_namespace("acme", "prod")]
    with pytest.raises(FailedPrecondition, match="cascade"):
        client.delete_tenant("acme")
    client.create_stream("acme", "prod", "orders")
    client.delete_namespace("acme", "prod", cascade=True)
    client.delete_tenant("acme")
    with pytest.raises(NotFound, match="unknown tenant 'acme'"):
        client.describe_tenant("acme")


def test_a_quota_is_changed_described_and_removed(client: Client) -> None:
    """felix-102: of a tenant and of a namespace, with both clients; a refusal is counted."""
    client.create_tenant("limited")
    client.create_namespace("limited", "prod")
    changed = client.change_quota("limited", topics=1, backlog_bytes=2**20)
    assert (changed.limits["topics"], changed.limits["backlog_bytes"]) == (1, 2**20)
    assert client.describe_quota("limited") == changed
    own = client.change_quota("limited", "prod", publish_rate_limit=50)
    assert (own.namespace, own.limits["publish_rate_limit"]) == ("prod", 50)
    assert own.limits["topics"] is None
    with Client(client.url, tenant="limited", namespace="prod") as there:
        there.create_topic("first")
        with pytest.raises(ResourceExhausted) as refused:
            there.create_topic("one-too-many")
        assert "topics" in refused.value.limit
        removed = client.change_quota("limited", topics=None)
        assert removed.limits["topics"] is None
        assert sum(removed.refused.values()) == 1
        there.create_topic("one-too-many")
    assert client.describe_quota("limited").used["topics"] == 2
    with pytest.raises(InvalidArgument):
        client.change_quota("limited", publish_rate_limit="fast")
    with pytest.raises(NotFound):
        client.describe_quota("nobody")

    async def scenario() -> None:
        async with AsyncClient(client.url) as other:
            found = await other.describe_quota("limited", "prod")
            assert (found.limits, found.used["topics"]) == (own.limits, 2)
            changed = await other.change_quota("limited", "prod", publish_rate_limit=None)
            assert changed.limits["publish_rate_limit"] is None
            with pytest.raises(NotFound):
                await other.change_quota("nobody", topics=1)

    asyncio.run(scenario())


def test_a_stream_is_created_changed_and_deleted(client: Client) -> None:
    """felix-125, 131."""
    path = ("default", "default", "orders")
    with pytest.raises(InvalidArgument, match="retention"):
        client.create_stream(*path, retention="7d")
    made = client.create_stream(*path, disconnect_slow_ms="7s", event_queue_depth=None)
    assert (made.disconnect_slow_ms, made.event_queue_depth) == (7000, 1024)
    with pytest.raises(AlreadyExists):
        client.create_stream(*path)
    assert client.change_stream(*path, event_queue_depth=4096).event_queue_depth == 4096
    found = client.change_stream(*path, event_queue_depth=None)
    assert found.origins["event_queue_depth"] == "broker"
    assert client.describe_stream(*path).subscribers == 0
    assert "orders" in [each.name for each in client.list_streams("default", "default")]
    with pytest.raises(FailedPrecondition, match="would be lost"):
        client.create_stream("default", "default", "other", delivery="at_least_once")
    client.delete_stream(*path)
    with pytest.raises(NotFound, match="stream not found"):
        client.describe_stream(*path)


def test_a_cache_is_created_changed_and_deleted(client: Client) -> None:
    """felix-72, 73, 74."""
    path = ("default", "default", "sessions")
    made = client.create_cache(*path, max_bytes="1GB", eviction_policy="lru")
    assert (made.max_bytes, made.max_entries) == (2**30, None)
    changed = client.change_cache(*path, max_entries=5, max_bytes=None)
    assert (changed.max_bytes, changed.max_entries) == (None, 5)
    assert client.describe_cache(*path).entries == 0
    assert "sessions" in [each.name for each in client.list_caches("default", "default")]
    with pytest.raises(FailedPrecondition, match="cannot change"):
        client.change_cache(*path, durable=True)
    client.delete_cache(*path)
    with pytest.raises(NotFound, match="cache scope not found"):
        client.describe_cache(*path)


def test_the_registry_says_whose_it_is(client: Client) -> None:
    before = client.registry_status()
    assert (before.role, before.control_plane) == ("own", "")
    client.create_tenant("counted")
    assert client.registry_status().revision == before.revision + 1


def test_version_and_health(client: Client) -> None:
    assert client.version().wal_enabled is False
    assert client.health().status == "ok"
    assert client.ready().status == "ready"


def test_consume_of_an_unknown_topic_fails_when_it_is_opened(client: Client) -> None:
    with pytest.raises(NotFound), client.consume("nowhere", "g"):
        pass
    with pytest.raises(NotFound):
        next(client.consume("nowhere", "g"))


def test_the_end_of_the_topic_ends_the_iteration(client: Client, topic: str) -> None:
    stream = client.consume(topic, "g").open()
    client.delete_topic(topic)
    assert list(stream) == []
    assert stream.ended
    assert not stream.timed_out


def test_wait_s_ends_the_iteration_in_time(client: Client, topic: str) -> None:
    client.produce(topic, "v")
    stream = client.consume(topic, "g", wait_s=0.3)
    started = time.monotonic()
    assert [delivery.value for delivery in stream] == ["v"]
    assert 0.3 <= time.monotonic() - started < 3
    assert stream.timed_out


def test_an_idle_stream_outlives_the_timeout(broker: BrokerProcess, topic: str) -> None:
    """Blank lines show that the broker is there; they are no deliveries."""
    with Client(broker.url, timeout_s=0.25) as client:
        stream = client.consume(topic, "g", wait_s=1.0)
        assert list(stream) == []
        assert stream.timed_out


def test_prefetch_bounds_what_is_taken(client: Client, topic: str) -> None:
    client.produce_batch([NewMessage(topic, str(n)) for n in range(5)])
    with client.consume(topic, "g", prefetch=2, wait_s=0.2) as stream:
        assert [delivery.value for delivery in stream] == ["0", "1"]


def test_a_client_may_be_shared_by_threads(client: Client, topic: str) -> None:
    def produce() -> None:
        for _ in range(20):
            client.produce(topic, "v")

    threads = [threading.Thread(target=produce) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.describe_topic(topic).next_offset == 160


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_no_broker_is_unavailable_and_says_how_to_start_one(nowhere: str) -> None:
    with Client(nowhere) as client:
        for ask in (client.version, client.consume("t", "g").open):
            with pytest.raises(Unavailable, match="penstock serve") as failure:
                ask()
            assert failure.value.retryable
            assert nowhere in failure.value.message


def test_a_broker_that_does_not_answer_is_unavailable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout_s=0.2) as client, pytest.raises(Unavailable, match="in time"):
            client.version()


def test_a_killed_broker_breaks_the_stream_as_unavailable() -> None:
    broker = BrokerProcess(None)
    try:
        broker.start().create_topic("t")
        with Client(broker.url) as client:
            stream = client.consume("t", "g").open()
            broker.kill()
            with pytest.raises(Unavailable):
                next(stream)
            assert stream.ended
    finally:
        broker.close()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://", "ftp://127.0.0.1", "http://h:port", "http://["]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgument):
            kind(url)


def test_a_token_is_sent_and_a_wrong_one_refused() -> None:
    broker = BrokerProcess(None, env={"PENSTOCK_TOKEN": "sesame"})
    try:
        broker.start()
        with Client(broker.url, token="sesame") as client:
            assert client.list_topics() == []
        with Client(broker.url, token="salami") as client, pytest.raises(Unauthenticated):
            client.list_topics()
        with pytest.raises(InvalidArgument):
            Client(broker.url, token="two\nlines")
    finally:
        broker.close()


def test_address_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerProcess(None, env={"PENSTOCK_TOKEN": "sesame"})
    try:
        broker.start()
        monkeypatch.setenv("PENSTOCK_URL", broker.url)
        monkeypatch.setenv("PENSTOCK_TOKEN", "sesame")
        with Client() as client:
            assert (client.url, client.list_topics()) == (broker.url, [])

        async def scenario() -> None:
            async with AsyncClient() as mine:
                assert await mine.list_topics() == []

        asyncio.run(scenario())
        for wrong in ("salami", ""):
            with Client(token=wrong) as client, pytest.raises(Unauthenticated):
                client.list_topics()
    finally:
        broker.close()


def test_an_argument_wins_over_the_environment(
    broker: BrokerProcess, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", nowhere)
    with Client(broker.url) as client:
        assert client.health().status == "ok"
    monkeypatch.delenv("PENSTOCK_URL")
    assert Client().url == AsyncClient().url == "http://127.0.0.1:8080"


@pytest.mark.parametrize("source", ["file", "environment", "function"])
def test_a_rotated_token_is_read_again(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker comes back with another token; the clients made before go on."""
    tokens = ["first"]
    broker = BrokerProcess(None, env={"PENSTOCK_TOKEN": "first"})

    def rotate(token: str) -> None:
        tokens[0] = token
        if source == "environment":
            monkeypatch.setenv("PENSTOCK_TOKEN", token)
        elif source == "file":
            (tmp_path / "token").write_text(token + "\n")
            monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))

    async def scenario() -> None:
        async with AsyncClient(broker.url, token=given) as mine:
            await mine.create_topic("t")
            change()
            await mine.produce("t", "v")
            async with mine.consume("t", "g", wait_s=10) as stream:
                assert (await anext(stream)).value == "w"

    def change() -> None:
        broker.flags = ("--port", str(broker.port))
        broker.env["PENSTOCK_TOKEN"] = "second"
        broker.restart()
        with pytest.raises(Unauthenticated):
            client.list_topics()
        rotate("second")
        client.create_topic("t")
        assert client.produce("t", "w").offset == 0

    try:
        broker.start()
        rotate("first")
        given = (lambda: tokens[0]) if source == "function" else None
        with Client(broker.url, token=given) as client:
            assert client.list_topics() == []
            asyncio.run(scenario())
    finally:
        broker.close()


def test_a_token_file_that_cannot_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="PENSTOCK_TOKEN_FILE"):
        Client()


def test_a_proxy_of_the_environment_is_not_used(
    broker: BrokerProcess, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", nowhere)
    with Client(broker.url) as client:
        assert client.health().status == "ok"


# -- the async client ----------------------------------------------------------------------------


def test_the_async_client_goes_all_the_way(broker: BrokerProcess, topic: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            await asyncio.gather(*(client.produce(topic, str(n)) for n in range(5)))
            values = set()
            async with client.consume(topic, "g", wait_s=0.3) as stream:
                async for delivery in stream:
                    values.add(delivery.value)
                    await client.ack(delivery)
            assert values == {"0", "1", "2", "3", "4"}
            assert stream.timed_out
            with pytest.raises(NotFound):
                await client.produce("nowhere", "v")
            with pytest.raises(NotFound):
                await client.consume("nowhere", "g").open()

    asyncio.run(scenario())


def test_the_async_client_without_a_broker_is_unavailable(nowhere: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(nowhere) as client:
            with pytest.raises(Unavailable, match="penstock serve"):
                await client.version()

    asyncio.run(scenario())


def test_the_end_of_the_topic_ends_the_async_iteration(broker: BrokerProcess, topic: str) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url) as client:
            stream = await client.consume(topic, "g").open()
            await client.delete_topic(topic)
            assert [delivery async for delivery in stream] == []
            assert stream.ended

    asyncio.run(scenario())


def test_both_clients_offer_every_operation() -> None:
    operations = {
        name: function
        for module in (requests, registry)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and str(inspect.signature(function).return_annotation).startswith(Call.__name__)
    }
    assert len(operations) == 44
    for name, function in operations.items():
        expected = inspect.signature(function)
        for kind in (Client, AsyncClient):
            method = getattr(kind("http://127.0.0.1:1"), name)
            offered = inspect.signature(method)
            assert offered.parameters == expected.parameters, name
            assert (method.__name__, bool(method.__doc__)) == (name, True)


def test_the_sdk_imports_without_the_servers_libraries() -> None:
    absent = ("click", "rich", "pyarrow", "uvloop", "httptools")
    program = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "from penstock.client import AsyncClient, Client, Worker"
    )
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


def test_the_package_imports_lazily() -> None:
    program = "import sys, penstock.client; sys.exit('httpx' in sys.modules)"
    env = {"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
