"""Streams and caches for the contract tests: with names of their own, and the usual requests."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name
from tests.ndjson import ConsumeStream


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unb64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class Namespace:
    """A namespace of a broker, `default` unless a test makes one."""

    def __init__(
        self, broker: BrokerProcess, tenant_id: str = "default", namespace: str = "default"
    ) -> None:
        self.broker = broker
        self.scope = {"tenant_id": tenant_id, "namespace": namespace}
        self.path = (
            f"/v1/tenants/{quote(tenant_id, safe='')}/namespaces/{quote(namespace, safe='')}"
        )

    # -- streams ------------------------------------------------------------------------------

    def create_stream(self, **settings: Any) -> str:
        return self._create("streams", new_name("s"), settings)

    def stream_path(self, stream: str) -> str:
        return f"{self.path}/streams/{quote(stream, safe='')}"

    def publish(self, stream: str, *payloads: bytes, **members: Any) -> httpx.Response:
        if len(payloads) == 1:
            return self.post(
                f"{self.stream_path(stream)}/publish", payload=b64(payloads[0]), **members
            )
        texts = [b64(payload) for payload in payloads]
        return self.post(f"{self.stream_path(stream)}/publish_batch", payloads=texts, **members)

    def subscribe(
        self,
        stream: str,
        query: str = "",
        receive_buffer: int | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> Feed:
        return Feed(
            self.broker.port,
            f"{self.stream_path(stream)}/subscribe?{query}",
            receive_buffer=receive_buffer,
            headers=headers,
        )

    def subscriptions(self, stream: str) -> list[dict[str, Any]]:
        reply = self.broker.client.get(f"{self.stream_path(stream)}/subscriptions")
        assert reply.status_code == 200, reply.text
        found: list[dict[str, Any]] = reply.json()["subscriptions"]
        return found

    # -- caches -------------------------------------------------------------------------------

    def create_cache(self, **settings: Any) -> str:
        return self._create("caches", new_name("c"), settings)

    def cache_path(self, cache: str) -> str:
        return f"{self.path}/caches/{quote(cache, safe='')}"

    def entry_path(self, cache: str, key: str) -> str:
        # A client would take a bare dot for a step on the path.
        part = quote(key, safe="").replace(".", "%2E")
        return f"{self.cache_path(cache)}/entries/{part}"

    def put(self, cache: str, key: str, value: bytes, **members: Any) -> httpx.Response:
        body = {"value": b64(value), **members}
        return self.broker.client.put(self.entry_path(cache, key), json=body)

    def get(self, cache: str, key: str) -> dict[str, Any]:
        reply = self.broker.client.get(self.entry_path(cache, key))
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def value(self, cache: str, key: str) -> bytes | None:
        text = self.get(cache, key)["value"]
        return None if text is None else unb64(text)

    def watch(self, cache: str, query: str) -> Feed:
        return Feed(self.broker.port, f"{self.cache_path(cache)}/watch?{query}")

    # -- both ---------------------------------------------------------------------------------

    def post(self, path: str, **members: Any) -> httpx.Response:
        return self.broker.client.post(path, json=members)

    def send(self, kind: str, **members: Any) -> httpx.Response:
        """One message to POST /v1/felix, with this namespace."""
        return self.post("/v1/felix", type=kind, **self.scope, **members)

    def _create(self, kind: str, name: str, settings: dict[str, Any]) -> str:
        reply = self.post(f"{self.path}/{kind}", name=name, **settings)
        assert reply.status_code == 201, reply.text
        return name


class Feed(ConsumeStream):
    """A subscription or watch over NDJSON; the first line is read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.status == 200, (self.status, self.rest_of_body())
        self.first: dict[str, Any] = self.next().members

    def payloads(self, count: int, timeout_s: float = 10.0) -> list[bytes]:
        return [unb64(item.members["payload"]) for item in self.take(count, timeout_s)]

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_typed_error(
    reply: httpx.Response, status: int, code: str, request_id: str | int | None = None
) -> dict[str, Any]:
    """The common error body with its type, and the request's id if it had one."""
    assert reply.status_code == status, (reply.status_code, reply.text)
    body: dict[str, Any] = reply.json()
    assert body["type"] == "error", body
    assert body["error"] == code, body
    assert body["message"].strip(), body
    assert body.get("request_id") == request_id, body
    assert ("request_id" in body) == (request_id is not None), body
    return body
