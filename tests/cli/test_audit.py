"""`penstock audit`: who changed what, filtered; and what its topic is not for."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.cli.conftest import Ran
from tests.cli.test_event import following
from tests.cli.test_whoami import Acme, acme  # noqa: F401


def rows(ran: Ran) -> list[dict[str, Any]]:
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


@pytest.fixture
def audited(acme: Acme) -> Acme:  # noqa: F811
    """felix-97: rules and topics of two tenants, and a refused attempt."""
    acme.run("topic", "create", "audited")
    acme.run("access", "grant", "zoe", "reader")
    acme.run("stream", "create", "refused", "-t", "default")
    acme.run("topic", "create", "elsewhere", token=acme.root)
    return acme


def test_rows_are_lines_with_who_what_and_where(audited: Acme) -> None:
    shown = audited.run("audit", token=audited.root).out
    assert " ok        topic.create topic:audited in=acme/default by=acme-admin from=127" in shown
    assert "topic:elsewhere in=default/default" in shown
    assert " denied    POST /v1/tenants/default/namespaces/default/streams" in shown


def test_rows_are_selected_by_principal_action_tenant_and_time(audited: Acme) -> None:
    def found(*options: str) -> list[dict[str, Any]]:
        return rows(audited.run("audit", "--json", *options, token=audited.root))

    assert {row["principal"] for row in found("--principal", "acme-admin")} == {"acme-admin"}
    assert {row["action"] for row in found("--action", "topic.*")} == {"topic.create"}
    assert {row["action"] for row in found("--action", "rule.grant")} == {"rule.grant"}
    assert {row["tenant_id"] for row in found("-t", "acme")} == {"acme"}
    assert len(found("--since", "1h")) == len(found()) > 3
    assert len(found("--since", "9999999d")) == len(found())
    assert found("--until", "1h") == found("--since", "2100-01-01") == []
    assert (
        "--since: 'soon' is not allowed; it takes a time"
        in audited.run("audit", "--since", "soon").err
    )


def test_the_detail_of_a_row_is_an_object(audited: Acme) -> None:
    granted = rows(audited.run("audit", "--json", "--action", "rule.grant"))[-1]
    assert granted["detail"]["permissions"] == ["reader"]
    assert granted["time"].endswith("Z")


def test_an_admin_of_a_tenant_sees_the_rows_of_that_tenant(audited: Acme) -> None:
    """felix-95"""
    assert {row["tenant_id"] for row in rows(audited.run("audit", "--json"))} == {"acme"}


def test_the_audit_topic_is_read_and_not_consumed(audited: Acme) -> None:
    refused = audited.run("consume", "penstock.audit", "--group", "g", token=audited.root)
    assert refused.code == 1
    assert (
        "nobody has consume on topic 'penstock.audit': read it with penstock audit" in refused.err
    )
    token = audited.new_token("plain", "--tenant", "acme", "--role", "reader")
    assert "needs the permission audit on the tenant" in audited.run("audit", token=token).err


def test_new_rows_are_followed_until_ctrl_c(audited: Acme) -> None:
    words = ("audit", "--follow", "--json", "--principal", "acme-admin", "--token", audited.token)
    with following(audited.url, *words, "--action", "cache.*") as follower:
        audited.run("cache", "create", "one")
        assert json.loads(follower.out.readline())["resource"] == "cache:one"
        audited.run("cache", "create", "two")
        assert json.loads(follower.out.readline())["resource"] == "cache:two"
        follower.process.send_signal(signal.SIGINT)
        assert follower.process.wait(timeout=20) == 0
