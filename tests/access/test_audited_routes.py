"""Every route that changes something administrative leaves one row in the audit log. Made from the
table of routes, so that a new one is listed here or fails."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.model.principals import Principal
from penstock.server.access import CHANGES, HandlerNeeds, Needs
from penstock.server.routes.table import ENDPOINTS
from tests.access.server import AccessServer

HERE = "/v1/tenants/{tenant_id}/namespaces/{namespace}"
NAMES = {"tenant_id": "audited", "namespace": "n", "topic": "t", "group": "g", "role": "r"}
NAMES |= {"stream": "s", "cache": "c", "subscription": "billing"}

AUDITED: list[tuple[str, Any, str]] = [
    ("POST /v1/tenants", {"tenant_id": "audited"}, "tenant.create tenant:audited"),
    ("PATCH /v1/tenants/{tenant_id}/quota", {"topics": 7}, "tenant.configure tenant:audited"),
    ("POST /v1/tenants/{tenant_id}/namespaces", {"namespace": "n"}, "namespace.create namespace:n"),
    (f"PATCH {HERE}/quota", {"disk_bytes": 9999}, "namespace.configure namespace:n"),
    (f"POST {HERE}/streams", {"name": "s", "delivery": "at_least_once"}, "stream.create stream:s"),
    (f"PATCH {HERE}/streams/{{stream}}", {"event_queue_depth": 7}, "stream.configure stream:s"),
    (
        f"DELETE {HERE}/streams/{{stream}}/subscriptions/{{subscription}}",
        None,
        "subscription.delete stream:s",
    ),
    (f"DELETE {HERE}/streams/{{stream}}", None, "stream.delete stream:s"),
    (f"POST {HERE}/caches", {"name": "c"}, "cache.create cache:c"),
    (f"PATCH {HERE}/caches/{{cache}}", {"max_entries": 7}, "cache.configure cache:c"),
    (f"DELETE {HERE}/caches/{{cache}}", None, "cache.delete cache:c"),
    (f"DELETE {HERE}", None, "namespace.delete namespace:n"),
    ("DELETE /v1/tenants/{tenant_id}", None, "tenant.delete tenant:audited"),
    ("POST /v1/topics", {"name": "t"}, "topic.create topic:t"),
    ("PATCH /v1/topics/{topic}", {"retention_ms": 1000}, "topic.configure topic:t"),
    ("DELETE /v1/topics/{topic}/groups/{group}", None, "group.delete topic:t"),
    ("DELETE /v1/topics/{topic}", None, "topic.delete topic:t"),
    ("POST /v1/apply", {"topics": [{"name": "applied"}]}, "topic.create topic:applied"),
    ("PUT /v1/access/roles/{role}", {"permissions": ["read"]}, "role.set role:r"),
    ("DELETE /v1/access/roles/{role}", None, "role.remove role:r"),
    (
        "POST /v1/access/rules",
        {"tenant_id": "default", "principal": "p", "permissions": ["read"]},
        "rule.grant rule:{id}",
    ),
    ("DELETE /v1/access/rules/{rule}", None, "rule.revoke rule:{rule}"),
    ("POST /v1/tokens", {"principal": "p"}, "token.create token:{id}"),
    ("POST /v1/tokens/{token_id}/rotate", {}, "token.rotate token:{token_id}"),
    ("DELETE /v1/tokens/{token_id}", None, "token.revoke token:{token_id}"),
]
"""Route, body, and the action and resource of its row. In this order each finds what it changes."""

OF_ARCHIVES = {
    "POST /v1/topics/{topic}/groups/{group}/progress",
    f"POST {HERE}/streams/{{stream}}/subscriptions/{{subscription}}/progress",
    "POST /v1/journal/archived",
}
"""Pipelines send these with every batch: they report work, and configure nothing."""


OF_CLUSTERS = {
    "POST /v1/cluster/move",
    "POST /v1/cluster/drain",
    "DELETE /v1/cluster/brokers/{broker}",
}
"""These need a cluster: tests/cli/test_cluster.py looks for their rows."""


@pytest.fixture
def changes(server: AccessServer) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Sends each of AUDITED; returns its route, the row that it should leave, and what it left."""
    names: dict[str, Any] = dict(NAMES)
    found = []
    for route, body, expected in AUDITED:
        method, _, path = route.partition(" ")
        _prepare(server, route)
        before = len(server.audit())
        answer = server.must("root", method, path.format(**names), body) or {}
        if route == "POST /v1/access/rules":
            names["rule"] = answer["id"]
        elif route == "POST /v1/tokens":
            names["token_id"] = answer["id"]
        left = server.audit()[before:]
        found.append((route, expected.format(**(names | answer)), left))
    return found


def _prepare(server: AccessServer, route: str) -> None:
    """Makes the group or the subscription that the route deletes."""
    if route == "DELETE /v1/topics/{topic}/groups/{group}":
        progress = {"partitions": [{"partition": 0, "next": 0}]}
        server.must("root", "POST", "/v1/topics/t/groups/g/progress", progress)
    elif "subscriptions" in route:
        with server.socket("root") as socket:
            names = {"tenant_id": "audited", "namespace": "n", "stream": "s"}
            message = {"type": "subscribe", "name": "billing", "owner": "w"} | names
            assert socket.ask(message)["type"] == "subscribed"


def test_every_administrative_route_leaves_exactly_one_row(
    changes: list[tuple[str, str, list[dict[str, Any]]]],
) -> None:
    for route, expected, left in changes:
        assert [f"{row['action']} {row['resource']}" for row in left] == [expected], route
        assert [(row["principal"], row.get("outcome", "ok")) for row in left] == [("root", "ok")]
    details = {route: left[0].get("detail", "") for route, _, left in changes}
    assert json.loads(details["PATCH /v1/tenants/{tenant_id}/quota"]) == {"topics": 7}
    assert json.loads(details[f"PATCH {HERE}/quota"]) == {"disk_bytes": 9999}
    (deleted,) = [text for route, text in details.items() if "subscriptions" in route]
    assert deleted == "subscription billing"


def test_every_route_that_needs_an_administrative_permission_is_audited() -> None:
    """A new route that changes something is listed above, with its row."""
    needing = {
        endpoint.route
        for endpoint in ENDPOINTS
        if isinstance(endpoint.access, Needs | HandlerNeeds)
        and endpoint.access.permission in CHANGES
        and endpoint.method != "GET"
    }
    assert needing == {route for route, _, _ in AUDITED} | OF_ARCHIVES | OF_CLUSTERS


MOVES_DATA = {
    "POST /v1/produce", "POST /v1/produce/batch", "POST /v1/ack", "POST /v1/ack/batch",
    "POST /v1/nack", "POST /v1/release", "POST /v1/release/batch", "POST /v1/extend",
    "POST /v1/idempotency/begin", "POST /v1/idempotency/renew", "POST /v1/idempotency/commit",
    "POST /v1/idempotency/fail", "POST /v1/transactions", "POST /v1/felix",
    "PUT /v1/writes/{producer}/{batch}/{part}/{piece}",
    "POST /v1/writes/{producer}/{batch}/commit", "DELETE /v1/writes/{producer}/{batch}",
    f"POST {HERE}/streams/{{stream}}/publish", f"POST {HERE}/streams/{{stream}}/publish_batch",
    f"POST {HERE}/streams/{{stream}}/ack", f"POST {HERE}/streams/{{stream}}/nack",
    f"POST {HERE}/streams/{{stream}}/extend", f"POST {HERE}/streams/{{stream}}/release",
    f"POST {HERE}/streams/{{stream}}/release_batch",
    f"PUT {HERE}/caches/{{cache}}/entries/{{key}}",
    f"DELETE {HERE}/caches/{{cache}}/entries/{{key}}",
    f"POST {HERE}/caches/{{cache}}/entries/{{key}}/incr",
    f"POST {HERE}/caches/{{cache}}/get_many", f"POST {HERE}/caches/{{cache}}/txn",
}  # fmt: skip
"""Messages, events and entries: the journal has those of topics and streams."""


def test_a_route_that_is_not_audited_moves_data() -> None:
    others = {each.route for each in ENDPOINTS if each.method != "GET"}
    assert others - {route for route, _, _ in AUDITED} - OF_ARCHIVES - OF_CLUSTERS == MOVES_DATA


def test_a_quota_that_is_removed_leaves_a_row(server: AccessServer) -> None:
    path = "/v1/tenants/other/quota"
    server.must("root", "PATCH", path, {"topics": 9})
    server.must("root", "PATCH", path, {"topics": None})
    first, last = [row for row in server.audit() if row["resource"] == "tenant:other"][-2:]
    assert (first["detail"], last["detail"]) == ('{"topics":9}', "no quota")


def test_changes_that_wait_for_others_to_become_durable_leave_rows(server: AccessServer) -> None:
    """The plan of `apply` and the read before a change answer when they are durable: later."""
    topics = [f"applied-{n}" for n in range(8)]
    limits = list(range(100, 108))

    def send(n: int) -> None:
        server.must("root", "POST", "/v1/produce", {"topic": "orders", "value": "busy"})
        server.must("root", "POST", "/v1/apply", {"topics": [{"name": topics[n]}]})
        server.must("root", "PATCH", "/v1/tenants/other/quota", {"topics": limits[n]})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(send, range(8)))
    rows = server.audit()
    assert {row["resource"] for row in rows} >= {f"topic:{name}" for name in topics}
    details = {row.get("detail") for row in rows if row["resource"] == "tenant:other"}
    assert details >= {json.dumps({"topics": each}, separators=(",", ":")) for each in limits}


def test_a_refused_deletion_of_a_subscription_leaves_a_row(server: AccessServer) -> None:
    path = "/v1/tenants/default/namespaces/default/streams/default/subscriptions/x"
    who = server.know(Principal("intruder"))
    assert server.ask(who, "DELETE", path).status_code == 403
    (row,) = [row for row in server.audit() if row["principal"] == who]
    assert (row["resource"], row["outcome"]) == ("stream:default", "denied")
