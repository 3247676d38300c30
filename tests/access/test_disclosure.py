"""Refusals tell nobody what exists beyond their reach."""

from __future__ import annotations

from penstock.model.principals import Principal
from tests.access.server import AccessServer


def test_rules_of_others_look_like_rules_that_do_not_exist(server: AccessServer) -> None:
    """felix-96."""
    there = server.grant("bob", "consume", "produce", tenant_id="other")
    for who in (Principal("spy"), Principal("spy-admin", tenant_id="default", is_admin=True)):
        name = server.know(who)
        known = server.ask(name, "DELETE", f"/v1/access/rules/{there}")
        unknown = server.ask(name, "DELETE", "/v1/access/rules/999999")
        assert known.status_code == unknown.status_code == 403
        assert known.json() == unknown.json()


def test_roles_and_tenants_of_others_cannot_be_told_from_none(server: AccessServer) -> None:
    """felix-96."""
    role = {"tenant_id": "other", "permissions": ["consume"]}
    server.must("root", "PUT", "/v1/access/roles/secret", role)
    name = server.know(Principal("role-spy", tenant_id="default", is_admin=True))

    def grant(tenant: str, namespace: str, permission: str) -> tuple[int, str]:
        rule = {
            "tenant_id": tenant,
            "namespace": namespace,
            "resource": "topic:orders",
            "principal": "m",
            "permissions": [permission],
        }
        reply = server.ask(name, "POST", "/v1/access/rules", rule)
        return reply.status_code, reply.json()["message"]

    (answer,) = {
        grant("other", "default", "secret"),
        grant("other", "default", "no-such-role"),
        grant("other", "no-such-namespace", "read"),
        grant("no-such-tenant", "default", "read"),
    }
    assert answer[0] == 403
    removals = [
        server.ask(name, "DELETE", f"/v1/access/roles/{each}?tenant_id=other")
        for each in ("secret", "no-such-role")
    ]
    assert [reply.status_code for reply in removals] == [403, 403]
    assert removals[0].json() == removals[1].json()


def test_tenants_and_namespaces_cannot_be_probed_by_lists(server: AccessServer) -> None:
    """felix-96: a list in a place that nobody may see is refused as one in a place that there is
    not."""
    server.must("root", "POST", "/v1/tenants", {"tenant_id": "secret"})
    server.must("root", "POST", "/v1/tenants/secret/namespaces", {"namespace": "prod"})
    server.must("root", "POST", "/v1/tenants/default/namespaces", {"namespace": "hidden"})
    free = server.know(Principal("list-spy"))
    bound = server.know(Principal("list-spy-admin", tenant_id="default", is_admin=True))
    guest = server.know(Principal("list-guest", tenant_id="default"))
    server.grant(guest, "read", namespace="default")

    def refusal(who: str, path: str, asked: str) -> tuple[int, str]:
        reply = server.ask(who, "GET", path)
        return reply.status_code, reply.text.replace(asked, "*")

    for who in (free, bound, guest):
        for rest in ("", "/prod/streams", "/prod/caches", "/none/streams"):
            answers = {
                refusal(who, f"/v1/tenants/{tenant}/namespaces{rest}", tenant)
                for tenant in ("secret", "nobody")
            }
            assert [status for status, _ in answers] == [403], answers
    for kind in ("streams", "caches"):
        answers = {
            refusal(guest, f"/v1/tenants/default/namespaces/{namespace}/{kind}", namespace)
            for namespace in ("hidden", "nowhere")
        }
        assert [status for status, _ in answers] == [403], answers
    for who in (bound, guest):
        names = server.must(who, "GET", "/v1/tenants/default/namespaces")["namespaces"]
        assert names
        server.must(who, "GET", "/v1/tenants/default/namespaces/default/streams")
    unknown = server.ask(bound, "GET", "/v1/tenants/default/namespaces/nowhere/streams")
    assert unknown.status_code == 404


def test_ids_of_transactions_cannot_be_probed(server: AccessServer) -> None:
    operations = [{"op": "produce", "topic": "probed", "value": "v"}]
    server.must("root", "POST", "/v1/topics", {"name": "probed"})
    used = {"transaction_id": "used", "operations": operations}
    server.must("root", "POST", "/v1/transactions", used)
    name = server.know(Principal("prober"))
    for probe in ([], operations):
        answers = [
            server.ask(
                name, "POST", "/v1/transactions", {"transaction_id": each, "operations": probe}
            )
            for each in ("used", "unused")
        ]
        assert answers[0].status_code == answers[1].status_code
        assert answers[0].json() == answers[1].json()
