"""Tokens and access rules: who may make a token, and how powerful it may be."""

from __future__ import annotations

from penstock.model.principals import Principal
from tests.access.server import AccessServer


def test_a_holder_of_access_makes_tokens_within_its_power(server: AccessServer) -> None:
    who = server.know(Principal("deputy"))
    server.grant(who, "reader", "access")
    server.grant("boss", "admin")
    wanted = {"principal": "bot", "tenant_id": "default", "roles": ["reader"]}
    made = server.must(who, "POST", "/v1/tokens", wanted)
    for refused in (
        wanted | {"roles": ["writer"]},
        wanted | {"admin": True},
        wanted | {"tenant_id": "other"},
        wanted | {"principal": "boss", "roles": []},
        {"principal": "bot"},
    ):
        assert server.ask(who, "POST", "/v1/tokens", refused).status_code == 403, refused
    strong = server.must("root", "POST", "/v1/tokens", wanted | {"roles": ["admin"]})
    assert server.ask(who, "POST", f"/v1/tokens/{strong['id']}/rotate").status_code == 403
    assert server.ask(who, "DELETE", f"/v1/tokens/{made['id']}").status_code == 204
    nobody = server.know(Principal("nobody"))
    assert server.ask(nobody, "POST", "/v1/tokens", wanted).status_code == 403
    assert server.ask(nobody, "DELETE", f"/v1/tokens/{strong['id']}").status_code == 403
    assert server.ask(nobody, "GET", "/v1/tokens").status_code == 403


def test_tokens_are_in_the_audit_log_without_their_secrets(server: AccessServer) -> None:
    made = server.must("root", "POST", "/v1/tokens", {"principal": "audited", "admin": True})
    turned = server.must("root", "POST", f"/v1/tokens/{made['id']}/rotate")
    server.must("root", "DELETE", f"/v1/tokens/{made['id']}")
    rows = [row for row in server.audit() if row["resource"] == f"token:{made['id']}"]
    assert [row["action"] for row in rows] == ["token.create", "token.rotate", "token.revoke"]
    for secret in (made["token"], turned["token"]):
        assert secret not in str(rows)


def test_the_name_of_a_permission_is_no_role(server: AccessServer) -> None:
    """A token cannot be created with it, and in a JWT it gives nothing."""
    wanted = {"principal": "bot", "tenant_id": "default", "roles": ["journal"]}
    refused = server.ask("root", "POST", "/v1/tokens", wanted)
    assert (refused.status_code, "no role" in refused.text) == (400, True)
    server.must("root", "POST", "/v1/produce", {"topic": "orders", "value": "secret"})
    who = server.know(Principal("jwt", tenant_id="default", roles=frozenset({"journal", "read"})))
    rows = server.ask(who, "GET", "/v1/journal?format=ndjson")
    assert rows.status_code == 403, rows.text
    assert server.must(who, "GET", "/v1/tenants/default/namespaces")["namespaces"] == []


def test_a_role_that_a_tenant_does_not_have_is_refused(server: AccessServer) -> None:
    """A typo would otherwise show only as refusals, later and elsewhere."""
    wanted = {"principal": "bot", "tenant_id": "other", "roles": ["wrtier"]}
    refused = server.ask("root", "POST", "/v1/tokens", wanted)
    assert refused.status_code == 400
    assert "the tenant 'other' has no role 'wrtier'; there are reader, writer" in refused.text
    server.must(
        "root", "PUT", "/v1/access/roles/wrtier", {"tenant_id": "other", "permissions": ["read"]}
    )
    server.must("root", "POST", "/v1/tokens", wanted)
    # A rule for a role is enough, and a token without a tenant may name any.
    server.must(
        "root",
        "POST",
        "/v1/access/rules",
        {"tenant_id": "other", "role": "crew", "permissions": ["read"]},
    )
    server.must("root", "POST", "/v1/tokens", wanted | {"roles": ["crew"]})
    server.must("root", "POST", "/v1/tokens", {"principal": "bot", "roles": ["anything"]})


def test_nobody_gets_a_token_in_the_brokers_own_names(server: AccessServer) -> None:
    """The audit log would show their changes as those of the static token, or of the broker."""
    for name in ("static-token", "broker", " broker "):
        refused = server.ask("root", "POST", "/v1/tokens", {"principal": name})
        assert (refused.status_code, "broker's own" in refused.text) == (400, True)
