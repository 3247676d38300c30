"""A namespace that is deleted and created again begins empty."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess
from tests.contract.checks import new_name

TRANSACTION = {
    "transaction_id": "tx",
    "operations": [{"op": "produce", "topic": "t", "value": "v"}],
}
COMMIT = {"parts": [{"part": 0, "attempt": "", "pieces": 1, "rows": 1}]}


class Tenant:
    """A tenant that can be deleted and created again under its name."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.name = new_name("tenant")
        self.create()

    def create(self) -> None:
        wanted = {
            "tenants": [{"tenant_id": self.name, "namespaces": ["default"]}],
            "topics": [{"tenant_id": self.name, "name": "t"}],
        }
        reply = self.broker.client.post("/v1/apply", json=wanted)
        assert reply.status_code == 200, reply.text

    def create_again(self) -> None:
        gone = self.broker.client.delete(f"/v1/tenants/{self.name}?cascade=true")
        assert gone.status_code == 204, gone.text
        self.create()

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"X-Penstock-Tenant": self.name}
        content = None if body is None else json.dumps(body)
        return self.broker.client.request(method, path, content=content, headers=headers)

    def stored(self) -> int:
        found: int = self.ask("GET", "/v1/topics/t").json()["next_offset"]
        return found


@pytest.fixture
def tenant(broker: BrokerProcess) -> Tenant:
    return Tenant(broker)


@pytest.mark.parametrize("restarts", [False, True])
def test_staged_rows_are_gone(tenant: Tenant, restarts: bool) -> None:
    staged = tenant.ask("PUT", "/v1/writes/p/1/0/0?topic=t", {"value": "old"})
    assert staged.status_code == 200, staged.text
    tenant.create_again()
    if restarts:
        tenant.broker.restart(kill=True)
    refused = tenant.ask("POST", "/v1/writes/p/1/commit", COMMIT)
    assert refused.status_code == 409, refused.text
    assert tenant.stored() == 0


def test_a_transaction_id_is_free_again(tenant: Tenant) -> None:
    assert tenant.ask("POST", "/v1/transactions", TRANSACTION).status_code == 200
    tenant.create_again()
    assert tenant.stored() == 0
    assert tenant.ask("POST", "/v1/transactions", TRANSACTION).status_code == 200
    assert tenant.stored() == 1


def test_a_producer_begins_again(tenant: Tenant) -> None:
    def write() -> None:
        assert tenant.ask("PUT", "/v1/writes/p/1/0/0?topic=t", {"value": "v"}).status_code == 200
        committed = tenant.ask("POST", "/v1/writes/p/1/commit", COMMIT)
        assert committed.json()["status"] == "committed", committed.text

    write()
    tenant.create_again()
    assert tenant.ask("GET", "/v1/writes/p").status_code == 404
    write()
    assert tenant.stored() == 1
