"""The audit log: who changed what, and who tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.engine.audit import REFUSALS_AT_ONCE
from penstock.model.principals import Principal
from penstock.server.http.requests import Request
from penstock.server.registry.control_plane import RemoteAnswer
from tests.access.server import AccessServer

HERE = "/v1/tenants/default/namespaces/default"
RECORDS = "/v1/topics/penstock.audit/partitions/0/records?format=ndjson"


def rows(server: AccessServer, action: str, who: str = "root") -> list[dict[str, Any]]:
    return [row for row in server.audit(who) if row["action"] == action]


def test_every_change_leaves_a_row(server: AccessServer) -> None:
    """Topics, groups, the registry, rules and roles."""
    topic = "/v1/topics/audited"
    server.must("root", "POST", "/v1/topics", {"name": "audited", "partitions": 2})
    server.must("root", "PATCH", topic, {"retention_ms": 1000})
    progress = {"partitions": [{"partition": 0, "next": 0}]}
    server.must("root", "POST", f"{topic}/groups/g/progress", progress)
    server.must("root", "DELETE", f"{topic}/groups/g")
    server.must("root", "DELETE", topic)
    server.must("root", "POST", f"{HERE}/streams", {"name": "audited"})
    server.must("root", "PATCH", f"{HERE}/streams/audited", {"event_queue_depth": 7})
    server.must("root", "DELETE", f"{HERE}/streams/audited")
    server.must("root", "POST", f"{HERE}/caches", {"name": "audited"})
    server.must("root", "POST", "/v1/tenants", {"tenant_id": "audited"})
    server.must("root", "POST", "/v1/tenants/audited/namespaces", {"namespace": "n"})
    server.must("root", "DELETE", "/v1/tenants/audited?cascade=true")
    server.must("root", "PUT", "/v1/access/roles/audited", {"permissions": ["read"]})
    server.revoke(server.grant("somebody", "audited"))
    server.must("root", "DELETE", "/v1/access/roles/audited")
    for action, resource in (
        ("topic.create", "topic:audited"),
        ("topic.configure", "topic:audited"),
        ("group.delete", "topic:audited"),
        ("topic.delete", "topic:audited"),
        ("stream.create", "stream:audited"),
        ("stream.configure", "stream:audited"),
        ("stream.delete", "stream:audited"),
        ("cache.create", "cache:audited"),
        ("tenant.create", "tenant:audited"),
        ("namespace.create", "namespace:n"),
        ("namespace.delete", "namespace:n"),
        ("tenant.delete", "tenant:audited"),
        ("role.set", "role:audited"),
        ("role.remove", "role:audited"),
    ):
        (row,) = [each for each in rows(server, action) if each["resource"] == resource]
        assert row["principal"] == "root"
        assert row["address"].startswith("127.0.0.1:")
        assert row.get("outcome", "ok") == "ok"
    assert rows(server, "rule.grant")[-1]["tenant_id"] == "default"
    assert rows(server, "rule.revoke")


def test_a_refused_attempt_leaves_a_row(server: AccessServer) -> None:
    who = server.know(Principal("intruder"))
    server.ask(who, "DELETE", "/v1/topics/orders")
    server.ask(who, "POST", "/v1/topics", {"name": "mine"})
    server.ask(who, "POST", f"{HERE}/caches", {"name": "mine"})
    rule = {"tenant_id": "default", "principal": who, "permissions": ["admin"]}
    server.ask(who, "POST", "/v1/access/rules", rule)
    found = [row for row in server.audit() if row["principal"] == who]
    assert [(row["action"], row["resource"], row["outcome"]) for row in found] == [
        ("DELETE /v1/topics/orders", "topic:orders", "denied"),
        ("POST /v1/topics", "topic:mine", "denied"),
        (f"POST {HERE}/caches", "cache:mine", "denied"),
        ("rule.grant", "*", "denied"),
    ]


def test_a_change_without_access_control_leaves_no_row(server: AccessServer) -> None:
    before = len(server.audit())
    server.must("", "POST", "/v1/topics", {"name": "unnamed"})
    assert len(server.audit()) == before


def test_the_audit_topic_belongs_to_the_broker(server: AccessServer) -> None:
    """Not even an admin writes to it, and not without access control either."""
    for who in ("root", ""):
        for method, path, body in (
            ("POST", "/v1/topics", {"name": "penstock.audit"}),
            ("DELETE", "/v1/topics/penstock.audit", None),
            ("PATCH", "/v1/topics/penstock.audit", {"retention_ms": 1}),
            ("POST", "/v1/produce", {"topic": "penstock.audit", "value": "forged"}),
            ("GET", "/v1/consume?topic=penstock.audit&group=g&owner=o", None),
        ):
            assert server.ask(who, method, path, body).status_code == 403, (who, path)
        envelope = {"target_topic": "penstock.audit"}
        redirected = {"topic": "orders", "value": "forged", "envelope": envelope}
        assert server.ask(who, "POST", "/v1/produce", redirected).status_code == 403
        row = b'{"topic":"penstock.audit","value":"forged"}\n'
        assert server.ask(who, "PUT", "/v1/writes/p/1/0/0", row).status_code == 403
    assert "forged" not in json.dumps(server.audit())


def test_reading_needs_audit_and_shows_the_rows_of_its_tenant(server: AccessServer) -> None:
    who = server.know(Principal("auditor"))
    server.grant(who, "reader", "writer", "operator")
    assert server.ask(who, "GET", RECORDS).status_code == 403
    assert "penstock.audit" not in server.must(who, "GET", "/v1/topics")["topics"]
    server.grant(who, "audit")
    server.must("root", "POST", "/v1/tenants/other/namespaces", {"namespace": "elsewhere"})
    server.must("root", "POST", "/v1/topics", {"name": "here"})
    shown = server.audit(who)
    assert {row["tenant_id"] for row in shown} == {"default"}
    assert {row.get("tenant_id", "") for row in server.audit()} >= {"default", "other"}
    assert "penstock.audit" in server.must(who, "GET", "/v1/topics")["topics"]
    forced = server.ask(who, "GET", RECORDS + "&tenant_id=other")
    assert "elsewhere" not in forced.text
    assert server.ask(who, "GET", "/v1/topics/penstock.audit").status_code == 200


def test_a_flood_of_refusals_is_counted_and_not_written(server: AccessServer) -> None:
    who = server.know(Principal("flood"))
    attempts = 3 * REFUSALS_AT_ONCE
    for _ in range(attempts):
        assert server.ask(who, "DELETE", "/v1/topics/orders").status_code == 403
    server.must("root", "POST", "/v1/topics", {"name": "after-the-flood"})
    written = [row for row in server.audit() if row["principal"] == who]
    last = server.audit()[-1]
    counted = sum(row.get("unwritten", 0) for row in [*written, last])
    assert len(written) + counted == attempts
    assert len(written) < attempts


def test_the_journal_and_offsets_have_the_audit_topic_too(server: AccessServer) -> None:
    found = server.must("root", "GET", "/v1/offsets")["topics"]
    assert "penstock.audit" in [each["topic"] for each in found]


class Plane:
    """Stands for the control plane that a registry follows."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def forward(self, request: Request, done: Callable[[RemoteAnswer], None]) -> None:
        self.asked.append(request.path)
        done(RemoteAnswer(201, b"{}"))


def test_a_follower_checks_before_it_forwards(server: AccessServer) -> None:
    """felix-95: the control plane trusts its follower, so the follower must check."""
    who = server.know(Principal("operator-there"))
    server.grant(who, "manage", resource="cache:mine*")
    plane = Plane()
    server.dispatch.follower = plane  # type: ignore[assignment]
    try:
        for method, path, body, status in (
            ("POST", f"{HERE}/caches", {"name": "theirs"}, 403),
            ("PATCH", f"{HERE}/caches/theirs", {"max_entries": 1}, 403),
            ("DELETE", f"{HERE}/caches/theirs", None, 403),
            ("POST", f"{HERE}/caches", {"name": "mine-1"}, 201),
            ("PATCH", f"{HERE}/caches/mine-1", {"max_entries": 1}, 201),
            ("DELETE", f"{HERE}/caches/mine-1", None, 201),
        ):
            assert server.ask(who, method, path, body).status_code == status, (method, path)
    finally:
        server.dispatch.follower = None
    assert len(plane.asked) == 3
    forwarded = [row for row in server.audit() if row.get("outcome") == "forwarded"]
    assert [row["action"].split(" ")[0] for row in forwarded] == ["POST", "PATCH", "DELETE"]


def test_a_tenant_reads_its_rows_in_its_own_scope(server: AccessServer) -> None:
    """The audit log has one name in every namespace."""
    who = server.know(Principal("auditor-there", tenant_id="other", roles=frozenset({"admin"})))
    server.must("root", "POST", "/v1/tenants/other/namespaces", {"namespace": "audited-there"})
    headers = {"Authorization": f"Bearer {who}", "X-Penstock-Tenant": "other"}
    reply = server.http.get(RECORDS, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "audited-there" in reply.text
    assert {
        json.loads(json.loads(line)["value"])["tenant_id"] for line in reply.text.splitlines()
    } == {"other"}


def test_a_reader_of_one_tenant_cannot_ask_for_the_rows_of_another(server: AccessServer) -> None:
    server.know(Principal("auditor"))
    server.grant("auditor", "audit")
    path = "/v1/topics/penstock.audit/partitions/0/records?format=ndjson&tenant_id="
    assert server.ask("auditor", "GET", path + "other").status_code == 403
    own = server.ask("auditor", "GET", path + "default")
    assert own.status_code == 200
    assert own.text == server.ask("auditor", "GET", path).text
    others = server.ask("root", "GET", path + "other").text.splitlines()
    assert {json.loads(line)["tenant_id"] for line in others} <= {"other"}
