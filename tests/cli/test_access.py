"""`penstock access`: grant, revoke, list, check and roles."""

from __future__ import annotations

import json

from tests.cli.conftest import Run


def test_rules_are_granted_listed_checked_and_revoked(penstock: Run) -> None:
    """felix-97"""
    granted = penstock("access", "grant", "ann", "produce", "read", "-r", "topic:or*", "--json")
    rule = json.loads(granted.out)
    assert (rule["principal"], rule["permissions"]) == ("ann", ["produce", "read"])
    assert f"{rule['id']}" in penstock("access", "list", "--principal", "ann").out
    allowed = penstock("access", "check", "ann", "produce", "topic:orders")
    assert (allowed.code, allowed.out) == (0, f"allowed: rule {rule['id']} allows it\n")
    denied = penstock("access", "check", "ann", "consume", "topic:orders")
    assert denied.code == 1
    assert denied.err == "Error: denied: no rule gives 'ann' consume here\n"
    assert penstock("access", "revoke", str(rule["id"])).code == 0
    assert penstock("access", "check", "ann", "produce", "topic:orders").code == 1
    again = penstock("access", "revoke", str(rule["id"]))
    assert again.code == 1
    assert "NOT_FOUND" in again.err


def test_a_rule_for_a_role_and_one_for_the_broker(penstock: Run) -> None:
    penstock("access", "grant", "crew", "operator", "--role")
    asked = ("access", "check", "bob", "manage", "topic:orders")
    assert penstock(*asked).code == 1
    assert penstock(*asked, "--roles", "crew").code == 0
    granted = penstock("access", "grant", "prometheus", "metrics", "--resource", "broker")
    assert granted.out.endswith("prometheus has metrics on the broker\n")
    assert penstock("access", "check", "prometheus", "metrics", "broker").code == 0


def test_roles_are_set_listed_and_removed(penstock: Run) -> None:
    made = penstock("access", "role", "set", "packer", "read", "consume")
    assert made.out == "role packer has consume, read\n"
    roles = json.loads(penstock("access", "role", "list", "--json").out)["roles"]
    assert [each["name"] for each in roles[:4]] == ["reader", "writer", "operator", "admin"]
    assert "packer" in [each["name"] for each in roles]
    penstock("access", "grant", "eve", "packer")
    used = penstock("access", "role", "remove", "packer")
    assert used.code == 1
    assert "FAILED_PRECONDITION" in used.err
    unknown = penstock("access", "grant", "eve", "fly")
    assert unknown.code == 1
    assert "there are access, audit" in unknown.err
