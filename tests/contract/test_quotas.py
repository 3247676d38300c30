"""Quotas over HTTP: set, read, refused with 429, and declared in a file."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.broker_process import BrokerProcess, eventually
from tests.contract.checks import new_name
from tests.websocket import WebSocket

EMPTY = {
    "publish_rate_limit": None,
    "publish_bytes_limit": None,
    "subscribe_connections": None,
    "topics": None,
    "cache_memory": None,
    "backlog_msgs": None,
    "backlog_bytes": None,
    "disk_bytes": None,
    "stream_retention": None,
    "connections": None,
    "idempotency_keys": None,
    "groups": None,
    "streams": None,
    "caches": None,
}


@pytest.fixture
def place(broker: BrokerProcess) -> str:
    """The path of a namespace of the test's own."""
    tenant = new_name("tenant")
    made = {
        "tenants": [{"tenant_id": tenant, "namespaces": ["prod"]}],
        "streams": [{"tenant_id": tenant, "namespace": "prod", "name": "s"}],
    }
    assert broker.client.post("/v1/apply", json=made).status_code == 200
    return f"/v1/tenants/{tenant}/namespaces/prod"


def publish(broker: BrokerProcess, place: str) -> httpx.Response:
    return broker.client.post(f"{place}/streams/s/publish", json={"payload": "eA=="})


def overdraw(broker: BrokerProcess, place: str) -> None:
    """Publishes so much that a rate of one per second stays used up for longer than a test."""
    url = f"{place}/streams/s/publish_batch"
    assert broker.client.post(url, json={"payloads": ["eA=="] * 1000}).status_code == 200


def test_a_quota_is_set_read_and_removed(broker: BrokerProcess, place: str) -> None:
    """felix-102, 131."""
    url = f"{place}/quota"
    first = broker.client.get(url).json()
    assert (first["limits"], first["refused"]) == (EMPTY, {})
    limits = {
        "publish_rate_limit": "10000/s",
        "publish_bytes_limit": "1MB/s",
        "cache_memory": "10GB",
        "stream_retention": "7d",
        "subscribe_connections": 100,
    }
    changed = broker.client.patch(url, json=limits)
    assert changed.status_code == 200, changed.text
    shown = {
        "publish_rate_limit": 10_000,
        "publish_bytes_limit": 2**20,
        "cache_memory": 10 * 2**30,
        "stream_retention": "7d",
        "subscribe_connections": 100,
    }
    assert changed.json()["limits"] == EMPTY | shown
    again = broker.client.patch(url, json={"cache_memory": None, "topics": 5}).json()
    assert again["limits"] == EMPTY | shown | {"cache_memory": None, "topics": 5}
    removed = broker.client.patch(url, json=dict.fromkeys(EMPTY)).json()
    assert removed["limits"] == EMPTY


def test_a_refusal_is_429_with_the_name_of_the_quota(broker: BrokerProcess, place: str) -> None:
    """felix-98."""
    broker.client.patch(f"{place}/quota", json={"publish_rate_limit": 1})
    overdraw(broker, place)
    refused = publish(broker, place)
    assert refused.status_code == 429
    body = refused.json()
    assert (body["error"], body["reason"]) == ("RESOURCE_EXHAUSTED", "quota")
    assert body["limit"] == "publish_rate_limit"
    assert body["retry_after_ms"] > 0
    assert int(refused.headers["retry-after"]) * 1000 >= body["retry_after_ms"]
    tenant = place.split("/")[3]
    metrics = broker.client.get("/metrics").text
    labels = f'namespace="prod",quota="publish_rate_limit",tenant="{tenant}"'
    assert f"penstock_quota_limit{{{labels}}} 1.0" in metrics
    assert f"penstock_quota_refusals_total{{{labels}}}" in metrics


def test_the_tenants_quota_holds_in_its_namespaces(broker: BrokerProcess, place: str) -> None:
    """felix-102."""
    tenant = place.removesuffix("/namespaces/prod")
    broker.client.patch(f"{tenant}/quota", json={"publish_rate_limit": 1})
    overdraw(broker, place)
    assert publish(broker, place).status_code == 429
    assert broker.client.get(f"{tenant}/quota").json()["refused"] == {"publish_rate_limit": 1}


def test_a_declared_quota_is_created_and_changed(broker: BrokerProcess) -> None:
    tenant = new_name("tenant")
    wanted: dict[str, Any] = {
        "tenants": [{"tenant_id": tenant, "namespaces": ["prod"]}],
        "quotas": [
            {"tenant_id": tenant, "topics": 9},
            {"tenant_id": tenant, "namespace": "prod", "publish_rate_limit": "5/s"},
        ],
    }
    made = broker.client.post("/v1/apply", json=wanted)
    assert made.status_code == 200, made.text
    quotas = [step for step in made.json()["steps"] if step["kind"] == "quota"]
    assert [(step["action"], step["changes"]) for step in quotas] == [
        ("create", [{"setting": "topics", "from": None, "to": 9}]),
        ("create", [{"setting": "publish_rate_limit", "from": None, "to": 5}]),
    ]
    url = f"/v1/tenants/{tenant}"
    assert broker.client.get(f"{url}/quota").json()["limits"]["topics"] == 9
    at_prod = f"{url}/namespaces/prod/quota"
    assert broker.client.get(at_prod).json()["limits"]["publish_rate_limit"] == 5
    wanted["quotas"][1]["publish_rate_limit"] = 7
    changed = broker.client.post("/v1/apply", json=wanted | {"changes": True}).json()
    assert [step["action"] for step in changed["steps"]] == ["keep", "keep", "keep", "change"]
    assert [step["kind"] for step in changed["steps"]] == ["tenant", "quota", "namespace", "quota"]
    assert changed["steps"][3]["changes"] == [{"setting": "publish_rate_limit", "from": 5, "to": 7}]
    assert broker.client.get(at_prod).json()["limits"]["publish_rate_limit"] == 7


def test_a_quota_of_an_unknown_tenant_is_a_conflict(broker: BrokerProcess) -> None:
    wanted = {"quotas": [{"tenant_id": new_name("tenant"), "topics": 1}], "dry_run": True}
    (step,) = broker.client.post("/v1/apply", json=wanted).json()["steps"]
    assert step["action"] == "conflict"
    assert step["kind"] == "quota"
    assert "declare it in [[tenants]]" in step["reason"]


@pytest.mark.parametrize(
    "limits",
    [
        {"publish_rate_limit": "fast"},
        {"publish_rate_limit": "5/m"},
        {"publish_rate_limit": 0},
        {"publish_bytes_limit": "5XB/s"},
        {"cache_memory": "many"},
        {"topics": -1},
        {"stream_retention": "never"},
        {"colour": 1},
    ],
)
def test_a_wrong_limit_is_400(broker: BrokerProcess, place: str, limits: dict[str, Any]) -> None:
    assert broker.client.patch(f"{place}/quota", json=limits).status_code == 400
    assert broker.client.get(f"{place}/quota").json()["limits"] == EMPTY


def test_the_quota_of_an_unknown_tenant_is_404(broker: BrokerProcess) -> None:
    url = f"/v1/tenants/{new_name('tenant')}/quota"
    assert broker.client.get(url).status_code == 404
    assert broker.client.patch(url, json={"topics": 1}).status_code == 404


def test_a_subscription_too_many_is_refused_over_http_and_websocket(
    broker: BrokerProcess, place: str
) -> None:
    """felix-99: many in one array, and closing one frees its place."""
    tenant = place.split("/")[3]
    made = {"name": "d", "delivery": "at_least_once"}
    assert broker.client.post(f"{place}/streams", json=made).status_code == 201
    broker.client.patch(f"{place}/quota", json={"subscribe_connections": 3})
    at = {"type": "subscribe", "tenant_id": tenant, "namespace": "prod", "stream": "d"}
    with WebSocket(broker.port) as ws:
        ws.send([at | {"name": "n", "owner": f"o{number}"} for number in range(20)])
        answers = ws.receive()
        opened = [each for each in answers if each["type"] == "subscribed"]
        refused = [each for each in answers if each["type"] == "error"]
        assert (len(opened), len(refused)) == (3, 17)
        assert {(each["reason"], each["limit"]) for each in refused} == {
            ("quota", "subscribe_connections")
        }
        for target in (f"{place}/streams/d/subscribe", f"{place}/streams/s/subscribe"):
            answer = broker.client.get(target)
            assert (answer.status_code, answer.json()["limit"]) == (429, "subscribe_connections")
        assert _open(broker, place) == 3
        metrics = broker.client.get("/metrics").text
        labels = f'namespace="prod",quota="subscribe_connections",tenant="{tenant}"'
        assert f"penstock_quota_used{{{labels}}} 3.0" in metrics
        ws.send({"type": "unsubscribe", "subscription_id": opened[0]["subscription_id"]})
        assert eventually(lambda: _open(broker, place) == 2)
        with broker.client.stream("GET", f"{place}/streams/s/subscribe") as feed:
            assert feed.status_code == 200
            assert _open(broker, place) == 3
    assert eventually(lambda: _open(broker, place) == 0)


def _open(broker: BrokerProcess, place: str) -> int:
    found: int = broker.client.get(f"{place}/quota").json()["used"]["subscribe_connections"]
    return found


def test_the_use_of_a_rate_is_shown_and_measured(broker: BrokerProcess, place: str) -> None:
    """felix-102."""
    broker.client.patch(f"{place}/quota", json={"publish_rate_limit": 10**6})

    def used() -> dict[str, int]:
        assert publish(broker, place).status_code == 200
        found: dict[str, int] = broker.client.get(f"{place}/quota").json()["used"]
        return found

    assert eventually(lambda: used()["publish_rate_limit"] > 0)
    assert eventually(lambda: used()["publish_bytes_limit"] > 0)
    labels = f'namespace="prod",quota="publish_rate_limit",tenant="{place.split("/")[3]}"'
    assert f"penstock_quota_used{{{labels}}}" in broker.client.get("/metrics").text


def test_staged_rows_and_commits_are_refused_with_the_quotas_name(
    broker: BrokerProcess, place: str
) -> None:
    headers = {"X-Penstock-Tenant": place.split("/")[3], "X-Penstock-Namespace": "prod"}
    client = broker.client
    assert client.post("/v1/topics", json={"name": "t"}, headers=headers).status_code == 201
    client.patch(f"{place}/quota", json={"backlog_msgs": 5, "disk_bytes": "1MB"})
    rows = b'{"value":"x"}\n' * 10
    url = "/v1/writes/p/0"
    staged = client.put(f"{url}/0/0?topic=t", content=rows, headers=headers)
    assert staged.status_code == 200, staged.text
    commit = {"parts": [{"part": 0, "pieces": 1, "rows": 10}]}
    refused = client.post(f"{url}/commit", json=commit, headers=headers)
    assert (refused.status_code, refused.json()["limit"]) == (429, "backlog_msgs")
    assert refused.json()["reason"] == "quota"
    assert "retry-after" in refused.headers
    client.patch(f"{place}/quota", json={"backlog_msgs": None, "disk_bytes": 100})
    full = client.put(f"{url}/0/1?topic=t", content=rows, headers=headers)
    assert (full.status_code, full.json()["limit"]) == (429, "disk_bytes")
    client.patch(f"{place}/quota", json={"disk_bytes": None})
    assert client.post(f"{url}/commit", json=commit, headers=headers).status_code == 200
