"""Access in transactions, quotas and declared resources: each part is checked by itself."""

from __future__ import annotations

import base64
from typing import Any, get_args

import pytest

from penstock.model.permissions import ALL_PERMISSIONS, BROKER_PERMISSIONS
from penstock.model.principals import Principal
from penstock.server.routes.transaction_operations import OperationBody
from tests.access.server import AccessServer

HERE = "/v1/tenants/default/namespaces/default"
DELIVERY = {"topic": "tasks", "group": "g", "partition": 0, "offset": 0, "owner": "o"}
EVENT = {"stream": "kept", "name": "n", "owner": "o", "offset": 0}
PUT = {"op": "cache_put", "cache": "ledger", "key": "k", "value": base64.b64encode(b"x").decode()}
OPERATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"op": "produce", "topic": "tasks", "value": "v"}, "produce", "topic:tasks"),
    ({"op": "ack"} | DELIVERY, "consume", "topic:tasks"),
    ({"op": "nack"} | DELIVERY, "consume", "topic:tasks"),
    (PUT, "cache_write", "cache:ledger"),
    ({"op": "publish", "stream": "kept", "payloads": ["eA=="]}, "publish", "stream:kept"),
    ({"op": "cache_delete", "cache": "ledger", "key": "k"}, "cache_write", "cache:ledger"),
    ({"op": "cache_incr", "cache": "ledger", "key": "n"}, "cache_write", "cache:ledger"),
    ({"op": "event_ack"} | EVENT, "subscribe", "stream:kept"),
    ({"op": "event_nack"} | EVENT, "subscribe", "stream:kept"),
    (
        {"op": "effect_commit", "topic": "tasks", "group": "g", "key": "k", "owner": "o"},
        "consume",
        "topic:tasks",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def resources(server: AccessServer) -> None:
    for name in ("tasks", "done"):
        server.must("root", "POST", "/v1/topics", {"name": name})
    server.must("root", "POST", f"{HERE}/caches", {"name": "ledger", "durable": True})
    kept = {"name": "kept", "delivery": "at_least_once"}
    server.must("root", "POST", f"{HERE}/streams", kept)


def test_no_operation_is_forgotten_here() -> None:
    known = {body.__struct_config__.tag for body in get_args(OperationBody)}
    assert {operation["op"] for operation, _, _ in OPERATIONS} == known


@pytest.mark.parametrize(
    ("operation", "permission", "resource"), OPERATIONS, ids=[o["op"] for o, _, _ in OPERATIONS]
)
def test_each_operation_of_a_transaction_needs_its_own_permission(
    server: AccessServer, operation: dict[str, Any], permission: str, resource: str
) -> None:
    """Every other permission that a resource can have is too little."""
    who = server.know(Principal(f"worker-{operation['op']}"))
    server.grant(who, "produce", namespace="default", resource="topic:done")
    others = sorted(ALL_PERMISSIONS - BROKER_PERMISSIONS - {permission})
    server.grant(who, *others, namespace="default", resource=resource)
    allowed = {"op": "produce", "topic": "done", "value": "v"}
    body = {"operations": [allowed, operation]}
    before = server.must("root", "GET", "/v1/topics/done")["next_offset"]
    refused = server.ask(who, "POST", "/v1/transactions", body)
    assert refused.status_code == 403, refused.text
    assert refused.json()["operation"] == 1
    assert permission in refused.json()["message"]
    assert server.must("root", "GET", "/v1/topics/done")["next_offset"] == before
    server.grant(who, permission, namespace="default", resource=resource)
    assert server.ask(who, "POST", "/v1/transactions", body).status_code in (200, 409)


def test_whoever_has_a_quota_cannot_raise_it(server: AccessServer) -> None:
    who = server.know(Principal("tenant-admin", tenant_id="default", is_admin=True))
    assert server.ask(who, "GET", "/v1/tenants/default/quota").status_code == 200
    for path in ("/v1/tenants/default/quota", f"{HERE}/quota"):
        assert server.ask(who, "PATCH", path, {"topics": 9}).status_code == 403
        assert server.ask("root", "PATCH", path, {"topics": None}).status_code == 200


def test_declared_resources_need_the_whole_broker(server: AccessServer) -> None:
    who = server.know(Principal("other-admin", tenant_id="default", is_admin=True))
    body = {"topics": [{"name": "tasks"}]}
    assert server.ask(who, "POST", "/v1/apply", body).status_code == 403
    assert server.ask("root", "POST", "/v1/apply", body).status_code == 200
