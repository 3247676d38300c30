"""Handles of a client with a token: without a tenant they are in the token's, as topics are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import AsyncClient, Client
from penstock.model.errors import InvalidArgument, PermissionDenied
from tests.broker_process import BrokerProcess

TOKEN = re.compile(r"pst_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")
SELF = "/v1/access/self"


class Asked(httpx.HTTPTransport):
    """Remembers the paths of the requests that it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        return super().handle_request(request)


class Acme:
    """A broker with access control, a token for its tenant `acme` and one for a namespace of it."""

    def __init__(self, process: BrokerProcess) -> None:
        self.url = process.url
        root = TOKEN.findall(process.stdout())[0]
        with Client(self.url, token=root) as admin:
            admin.create_tenant("acme")
            for namespace in ("default", "prod"):
                admin.create_namespace("acme", namespace)
                admin.create_cache("acme", namespace, "c")
                admin.create_stream("acme", namespace, "s", delivery="at_least_once")
            named: dict[str, Any] = {"tenant_id": "acme", "admin": True}
            self.token = admin.create_token("of-acme", **named).token
            self.narrow = admin.create_token("of-prod", namespace="prod", **named).token

    def client(self, token: str, asked: Asked | None = None, **names: Any) -> Client:
        return Client(self.url, token=token, transport=asked or Asked(), **names)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Acme]:
    directory: Path = tmp_path_factory.mktemp("acme")
    with BrokerProcess(directory / "data", "--access-control") as process:
        yield Acme(process)


def place_of(client: Client, name: str) -> str:
    """Puts a value where the client's handle is, and returns the namespace that has it."""
    client.cache("c").put("k", name.encode())
    for namespace in ("default", "prod"):
        found = client.cache("c", tenant_id="acme", namespace=namespace).get("k")
        if found is not None and found.value == name.encode():
            return f"acme/{namespace}"
    return "nowhere"


def test_a_handle_without_a_tenant_is_in_that_of_the_token(acme: Acme) -> None:
    asked = Asked()
    with acme.client(acme.token, asked) as client:
        assert place_of(client, "plain") == "acme/default"
        client.stream("s").publish(b"x")
        assert client.path_scope() == ("acme", "default")
    assert asked.paths.count(SELF) == 1
    with acme.client(acme.token, namespace="prod") as client:
        assert place_of(client, "named") == "acme/prod"
        client.create_topic("t")
    with acme.client(acme.token, tenant="acme", namespace="prod") as client:
        assert "t" in client.list_topics()


def test_a_token_of_a_namespace_needs_no_name_at_all(acme: Acme) -> None:
    with acme.client(acme.narrow) as client:
        client.cache("c").put("k", b"narrow")
        found = client.cache("c", tenant_id="acme", namespace="prod").get("k")
        assert found is not None
        assert found.value == b"narrow"


def test_nothing_is_asked_if_the_tenant_is_named(acme: Acme) -> None:
    for names in ({"tenant": "acme"}, {"tenant": "acme", "namespace": "prod"}):
        asked = Asked()
        with acme.client(acme.token, asked, **names) as client:
            client.cache("c").put("k", b"v")
            client.stream("s").publish(b"x")
        assert SELF not in asked.paths
    asked = Asked()
    with acme.client(acme.token, asked) as client:
        client.cache("c", tenant_id="acme").put("k", b"v")
        with pytest.raises(PermissionDenied):
            client.cache("c", tenant_id="default").get("k")
    assert SELF not in asked.paths


def test_nothing_is_asked_without_a_credential(broker: BrokerProcess) -> None:
    asked = Asked()
    with Client(broker.url, transport=asked) as client:
        client.cache("default").get("k")
        assert client.stream("s").path == ("default", "default", "s")
    assert len(asked.paths) == 1


def test_events_feeds_and_transactions_are_there_too(acme: Acme) -> None:
    with acme.client(acme.token, namespace="prod") as client:
        stream = client.stream("s")
        with stream.events(name="n", start="earliest", wait_s=10) as events:
            stream.publish(b"one", ack="per_message")
            first = next(events)
            with client.transaction() as transaction:
                transaction.ack(first)
                transaction.publish("s", b"two")
            while (event := next(events)).payload != b"two":
                event.ack()
            event.ack()
        assert stream.subscriptions().named[0].messages_behind == 0
        assert [event.payload for event in stream.read_range()][-1] == b"two"
        with client.cache("c").entries() as entries:
            assert list(entries) is not None


def test_a_socket_is_in_the_tenant_of_the_token(acme: Acme) -> None:
    with acme.client(acme.token, namespace="prod") as client:
        with pytest.raises(InvalidArgument, match="open the socket first"):
            client.connect().cache("c")
        with client.connect() as socket:
            socket.cache("c").put("k", b"socket")
            assert socket.stream("s").path == ("acme", "prod", "s")
            with socket.stream("s").events(name="m", start="earliest", wait_s=10) as events:
                event = next(events)
                with client.transaction() as transaction:
                    transaction.ack(event)
    with acme.client(acme.token, tenant="acme", namespace="prod") as client:
        found = client.cache("c").get("k")
        assert found is not None
        assert found.value == b"socket"


def test_an_asyncio_client_does_the_same(acme: Acme) -> None:
    async def run() -> bytes:
        async with AsyncClient(acme.url, token=acme.token, namespace="prod") as client:
            await client.cache("c").put("k", b"asyncio")
            async with client.connect() as socket:
                found = await socket.cache("c").get("k")
            assert found is not None
            return found.value

    assert asyncio.run(run()) == b"asyncio"
