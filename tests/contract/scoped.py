"""Requests in one tenant and namespace, and what the broker shows of it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import httpx

from tests.broker_process import BrokerProcess
from tests.ndjson import ConsumeStream, Item

DEFAULT = ("default", "default")
ACME = ("acme", "prod")
GLOBEX = ("globex", "prod")
OTHER = ("acme", "test")
SCOPES = (DEFAULT, ACME, GLOBEX, OTHER)

GROUP, OWNER, KEY, PRODUCER = "g", "o", "k", "nightly"


def create_namespaces(broker: BrokerProcess) -> None:
    for tenant, namespace in SCOPES[1:]:
        broker.client.post("/v1/tenants", json={"tenant_id": tenant}).raise_for_status()
        made = broker.client.post(f"/v1/tenants/{tenant}/namespaces", json={"namespace": namespace})
        made.raise_for_status()


class ScopedBroker:
    """The default scope is named by no header, as every client of an older version does."""

    def __init__(self, broker: BrokerProcess, scope: tuple[str, str]) -> None:
        self.broker = broker
        self.scope = scope
        self.headers = (
            {}
            if scope == DEFAULT
            else {"X-Penstock-Tenant": scope[0], "X-Penstock-Namespace": scope[1]}
        )

    @property
    def word(self) -> str:
        """A text that only values of this scope have."""
        return f"owner-{SCOPES.index(self.scope)}" if self.scope in SCOPES else "owner-x"

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.broker.client.request(method, path, headers=self.headers, **options)

    def must(self, method: str, path: str, **options: Any) -> httpx.Response:
        reply = self.send(method, path, **options)
        assert reply.is_success, (method, path, reply.status_code, reply.text)
        return reply

    def produce(self, topic: str, value: str = "", **members: Any) -> httpx.Response:
        body = {"topic": topic, "value": value or f"value of {self.word}", **members}
        return self.must("POST", "/v1/produce", json=body)

    def open_consume(self, topic: str, group: str = GROUP, **options: Any) -> ConsumeStream:
        query = {"topic": topic, "group": group, "owner": OWNER, "lease_ms": 60_000} | options
        target = f"/v1/consume?{urlencode(query)}"
        stream = ConsumeStream(self.broker.port, target, headers=list(self.headers.items()))
        assert stream.status == 200, stream.rest_of_body()
        return stream

    def take(self, topic: str, count: int, group: str = GROUP) -> list[Item]:
        stream = self.open_consume(topic, group)
        try:
            return stream.take(count)
        finally:
            stream.close()

    def values(self, topic: str) -> list[str]:
        path = f"/v1/topics/{topic}/partitions/0/records?format=ndjson"
        return [json.loads(line)["value"] for line in self.must("GET", path).text.splitlines()]

    def fill(self, topic: str) -> None:
        """The same names everywhere: a topic with messages in flight, an effect that runs, a
        staged and a committed batch."""
        self.must("POST", "/v1/topics", json={"name": topic})
        envelope = {"idempotency_key": KEY, "run_id": "run-1"}
        self.produce(topic, key="one", envelope=envelope)
        self.produce(topic, key="two")
        self.take(topic, 2)
        effect = {"topic": topic, "group": GROUP, "key": KEY, "owner": OWNER, "lease_ms": 60_000}
        self.must("POST", "/v1/idempotency/begin", json=effect)
        for batch in (1, 2):
            self.stage(topic, batch)
        self.commit(topic, 1)

    def stage(self, topic: str, batch: int) -> None:
        line = json.dumps({"value": f"row of {self.word}"}).encode()
        path = f"/v1/writes/{PRODUCER}-{topic}/{batch}/0/0?topic={topic}"
        self.must("PUT", path, content=line)

    def commit(self, topic: str, batch: int) -> httpx.Response:
        parts = {"parts": [{"part": 0, "pieces": 1, "rows": 1}]}
        return self.must("POST", f"/v1/writes/{PRODUCER}-{topic}/{batch}/commit", json=parts)

    def picture(self, topic: str) -> dict[str, Any]:
        """All that can be seen of the topic and its producer without changing anything."""
        effect = urlencode({"topic": topic, "group": GROUP, "key": KEY})
        paths = {
            "topic": f"/v1/topics/{topic}",
            "offsets": f"/v1/topics/{topic}/offsets",
            "records": f"/v1/topics/{topic}/partitions/0/records?format=ndjson",
            "dead letters": f"/v1/topics/dlq.{topic}/partitions/0/records?format=ndjson",
            "producer": f"/v1/writes/{PRODUCER}-{topic}",
            "effect": f"/v1/idempotency?{effect}",
        }
        shown: dict[str, Any] = {}
        for name, path in paths.items():
            reply = self.send("GET", path)
            shown[name] = (reply.status_code, reply.text)
        # Time goes by.
        status, text = shown["effect"]
        if status == 200:
            shown["effect"] = (status, {**json.loads(text), "lease_ms": 0})
        return shown
