"""Clients of a tenant and namespace: topics, producers, streams and caches by name alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from penstock.client import AsyncClient, Client, Delivery
from penstock.client.scope import ClientScope
from penstock.client.worker import Worker
from penstock.model.errors import InvalidArgument, NotFound
from tests.broker_process import BrokerProcess


@pytest.fixture
def acme(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url, tenant="acme", namespace="prod") as client:
        client.create_tenant("acme")
        client.create_namespace("acme", "prod")
        yield client


def test_a_client_has_the_topics_of_its_namespace(acme: Client, client: Client, topic: str) -> None:
    with pytest.raises(NotFound, match="of acme/prod"):
        acme.describe_topic(topic)
    acme.create_topic(topic)
    client.produce(topic, "plain")
    produced = acme.produce(topic, "scoped")
    assert (produced.topic, produced.offset) == (topic, 0)
    assert acme.describe_topic(topic).name == topic
    assert topic in acme.list_topics()
    for each, value in ((client, "plain"), (acme, "scoped")):
        with each.consume(topic, "g", wait_s=5) as deliveries:
            delivery = next(deliveries)
            assert (delivery.topic, delivery.value) == (topic, value)
            each.ack(delivery)
        assert [row["value"] for row in each.read_range(topic, 0)] == [value]


def test_a_dead_letter_is_redriven_in_its_namespace(acme: Client, client: Client) -> None:
    acme.create_topic("redriven")
    acme.produce("redriven", "v")
    with acme.consume("redriven", "g", wait_s=5) as deliveries:
        acme.nack(next(deliveries), "bad", dead=True)
    with acme.consume("dlq.redriven", "g", wait_s=5) as letters:
        acme.redrive(next(letters))
    assert [row["value"] for row in acme.read_range("redriven", 0)] == ["v", "v"]
    assert "redriven" not in client.list_topics()


def test_handles_have_the_clients_namespace(acme: Client, client: Client) -> None:
    acme.create_cache("acme", "prod", "sessions")
    acme.cache("sessions").put("k", b"v")
    found = client.cache("sessions", tenant_id="acme", namespace="prod").get("k")
    assert found is not None
    assert found.value == b"v"
    assert acme.stream("default", tenant_id="default", namespace="default").path == (
        "default", "default", "default",
    )  # fmt: skip
    assert acme.stream("s").path == ("acme", "prod", "s")
    assert client.cache("c").path == ("default", "default", "c")


def test_an_asyncio_client_does_the_same(acme: Client, broker: BrokerProcess) -> None:
    acme.create_topic("shared")

    async def produce() -> None:
        async with AsyncClient(broker.url, tenant="acme", namespace="prod") as other:
            assert (await other.produce("shared", "v")).offset == 0
            assert other.stream("s").path == ("acme", "prod", "s")

    asyncio.run(produce())
    assert [row["value"] for row in acme.read_range("shared", 0)] == ["v"]


def test_a_worker_works_in_its_clients_namespace(acme: Client) -> None:
    acme.create_topic("worked")
    acme.produce("worked", "v")
    seen: list[str] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.value)
        worker.stop()

    worker = Worker(acme, "worked", "g", handle)
    worker.run()
    assert seen == ["v"]
    assert acme.describe_topic("worked").groups[0].partitions[0].lag == 0


def test_the_environment_names_a_scope_that_arguments_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_TENANT", "acme")
    monkeypatch.setenv("PENSTOCK_NAMESPACE", "prod")
    assert ClientScope.of(None, None) == ("acme", "prod")
    assert ClientScope.of("globex", None) == ("globex", "prod")
    assert ClientScope.of("", "") == ("", "")
    sent: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers)
        return httpx.Response(200, json={"topics": []})

    transport = httpx.MockTransport(answer)
    for tenant in (None, "", "käse"):
        with Client("http://x", tenant=tenant, namespace=tenant, transport=transport) as client:
            client.list_topics()
    named, plain, other = (dict(each.raw) for each in sent)
    assert named[b"X-Penstock-Tenant"] == b"acme"
    assert named[b"X-Penstock-Namespace"] == b"prod"
    assert not {b"X-Penstock-Tenant", b"X-Penstock-Namespace"} & plain.keys()
    assert other[b"X-Penstock-Tenant"] == "käse".encode()


@pytest.mark.parametrize("name", ["a\x1fb", "a\r\nX: y", "n" * 201])
def test_a_wrong_name_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(InvalidArgument, match="tenant"):
        Client("http://x", tenant=name)
    with pytest.raises(InvalidArgument, match="namespace"):
        Client("http://x", namespace=name)
