"""Access rules, roles and the audit log in the engine: durable, and applied from the log alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine import audit
from penstock.model.access import AccessRule, Role
from penstock.model.audit import AUDIT_TOPIC, Actor
from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from penstock.model.limits import Limits
from penstock.model.principals import Principal
from penstock.model.ranges import RangeRequest
from penstock.model.scopes import DEFAULT_SCOPE
from penstock.model.tenancy import Entry
from tests.engine.harness import LEASE_MS, Broker
from tests.property.follower import Follower
from tests.storage.faulty_vfs import FLAVOURS, FaultyVfs

ANN, BOB = Principal("ann"), Principal("bob")
ROOT = Actor("root", "127.0.0.1:1")


def rule(principal: str = "ann", *permissions: str, **members: Any) -> AccessRule:
    where = {"tenant_id": "default"} | members
    return AccessRule(principal=principal, permissions=permissions or ("produce",), **where)


def held(broker: Broker, who: Principal, name: str = "orders") -> frozenset[str]:
    return broker.engine.access.permissions_on(who, "topic", DEFAULT_SCOPE, name)


@pytest.fixture
def broker() -> Any:
    broker = Broker(FaultyVfs())
    yield broker
    broker.close()


def filled(broker: Broker) -> None:
    access = broker.engine.access
    broker.must(
        access.set_role, Role(tenant_id="default", name="team", permissions=("read",)), None
    )
    broker.must(access.grant, rule("ann", "produce", "team", resource="topic:o*"), None)
    second = broker.must(access.grant, rule("bob", "admin"), None)[0]
    broker.must(access.revoke, second.id, None)
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "orders", 2)


@pytest.mark.parametrize("how", ["restart", "seal", *FLAVOURS])
def test_rules_and_roles_outlive_the_process(broker: Broker, how: str) -> None:
    """felix-97: and a second state that applies the log equals the live one."""
    follower = Follower(broker)
    filled(broker)
    follower.compare()
    if how == "restart":
        broker.restart()
    elif how == "seal":
        broker.seal_and_crash()
    else:
        broker.crash(how)
    assert held(broker, ANN) == {"produce", "read"}
    assert held(broker, BOB) == frozenset()
    third = broker.must(broker.engine.access.grant, rule("bob"), None)[0]
    assert third.id > max(1, 2), "an id is never used again"


def test_a_grant_that_exists_is_not_granted_again(broker: Broker) -> None:
    first, is_new = broker.must(broker.engine.access.grant, rule(), None)
    again, is_new_again = broker.must(broker.engine.access.grant, rule(), None)
    assert (is_new, is_new_again) == (True, False)
    assert first == again


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (rule("ann", "fly"), NotFound),
        (rule("", "read"), InvalidArgument),
        (AccessRule(tenant_id="default", principal="a", role="b", permissions=("read",)),
         InvalidArgument),
        (rule("ann", "read", tenant_id="*"), InvalidArgument),
        (rule("ann", "read", tenant_id="def*"), InvalidArgument),
        (rule("ann", "read", tenant_id=""), InvalidArgument),
        (rule("ann", "read", tenant_id="absent"), NotFound),
        (rule("ann", "read", namespace="absent"), NotFound),
        (rule("ann", "read", resource="topics:x"), InvalidArgument),
        (rule("ann", "read", resource="topic:"), InvalidArgument),
        (rule("ann", "read", resource="broker"), InvalidArgument),
        (rule("ann", "read", resource="broker:x"), InvalidArgument),
        (rule("ann", "read", resource="topic:*orders"), InvalidArgument),
        (rule("ann", "read", resource="topic:or*ers*"), InvalidArgument),
        (rule("ann", "read", namespace="*prod"), InvalidArgument),
        (rule("ann", "read", "metrics"), InvalidArgument),
    ],
)  # fmt: skip
def test_a_rule_that_means_nothing_is_refused(
    broker: Broker, wanted: AccessRule, error: type[Exception]
) -> None:
    """felix-96: no pattern for tenants."""
    outcome = broker.call(broker.engine.access.grant, wanted, None)
    assert isinstance(outcome, error), outcome


def test_nobody_grants_what_they_lack_or_beyond_their_reach(broker: Broker) -> None:
    access = broker.engine.access
    broker.must(access.grant, rule("ann", "produce", "access", resource="topic:o*"), None)
    for wanted in (
        rule("bob", "consume", resource="topic:orders"),
        rule("bob", "writer", resource="topic:orders"),
        rule("bob", "produce", resource="topic:*"),
        rule("bob", "produce", resource="*"),
        rule("bob", "produce", resource="cache:o"),
    ):
        assert isinstance(broker.call(access.grant, wanted, ANN), PermissionDenied), wanted
    given = broker.must(access.grant, rule("bob", "produce", resource="topic:or*"), ANN)[0]
    assert "produce" in held(broker, BOB)
    mighty = broker.must(access.grant, rule("cid", "manage", resource="topic:orders"), None)[0]
    assert isinstance(broker.call(access.revoke, mighty.id, ANN), PermissionDenied)
    assert isinstance(broker.call(access.revoke, given.id, BOB), PermissionDenied)
    broker.must(access.revoke, given.id, ANN)
    assert held(broker, BOB) == frozenset()


def test_a_token_with_roles_can_be_checked_like_a_rule(broker: Broker) -> None:
    """Who makes a token for a tenant gives its roles in all of the tenant."""
    access = broker.engine.access
    broker.must(access.grant, rule("ann", "read", "access"), None)
    strong = AccessRule(tenant_id="default", role="on-call", permissions=("manage",))
    broker.must(access.grant, strong, None)
    access.check_grant(rule("token", "read"), ANN)
    for roles in (("writer",), ("on-call",)):
        with pytest.raises(PermissionDenied):
            access.check_grant(rule("token", *roles), ANN)
    access.check_name("default", "token", ANN)
    broker.must(access.grant, rule("token", "manage"), None)
    with pytest.raises(PermissionDenied):
        access.check_name("default", "token", ANN)


def test_a_role_cannot_be_a_detour_to_more(broker: Broker) -> None:
    """A rule gives a role the right to manage; who cannot manage cannot give the role."""
    access = broker.engine.access
    broker.must(
        access.set_role, Role(tenant_id="default", name="team", permissions=("read",)), None
    )
    strong = AccessRule(tenant_id="default", role="team", permissions=("manage",))
    broker.must(access.grant, strong, None)
    broker.must(access.grant, rule("ann", "read", "access"), None)
    assert isinstance(broker.call(access.grant, rule("ann", "team"), ANN), PermissionDenied)
    changed = Role(tenant_id="default", name="team", permissions=("read", "produce"))
    assert isinstance(broker.call(access.set_role, changed, ANN), PermissionDenied)
    assert "manage" not in held(broker, ANN)


def test_an_admin_of_a_tenant_grants_in_that_tenant_only(broker: Broker) -> None:
    broker.must(broker.engine.registry.create, Entry(kind="tenant", tenant_id="acme"))
    admin = Principal("admin", tenant_id="acme", is_admin=True)
    access = broker.engine.access
    broker.must(access.grant, rule("bob", "admin", tenant_id="acme"), admin)
    for wanted in (rule("bob", "read"), AccessRule(resource="broker", principal="bob",
                                                   permissions=("metrics",))):  # fmt: skip
        assert isinstance(broker.call(access.grant, wanted, admin), PermissionDenied)


def test_a_role_in_use_is_not_removed(broker: Broker) -> None:
    access = broker.engine.access
    broker.must(
        access.set_role, Role(tenant_id="default", name="team", permissions=("read",)), None
    )
    given = broker.must(access.grant, rule("ann", "team"), None)[0]
    outcome = broker.call(access.remove_role, "default", "team", None)
    assert isinstance(outcome, FailedPrecondition)
    broker.must(access.revoke, given.id, None)
    broker.must(access.remove_role, "default", "team", None)
    for name in ("admin", "produce"):
        role = Role(tenant_id="default", name=name, permissions=("read",))
        assert isinstance(broker.call(access.set_role, role, None), InvalidArgument)


# -- the audit log ---------------------------------------------------------------------------------


def rows(broker: Broker) -> list[dict[str, Any]]:
    request = RangeRequest(topic=AUDIT_TOPIC, partition=0, format="ndjson")
    opened = broker.must(broker.engine.ranges.open, request)
    found = b""
    while not opened.is_over():
        found += bytes(broker.must(opened.next) or b"")
    return [json.loads(json.loads(line)["value"]) for line in found.splitlines()]


def test_a_row_shares_the_frame_of_its_change(broker: Broker) -> None:
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "first", 1)
    frames: list[int] = []
    append, append_one = broker.log.append, broker.log.append_one

    def noting(call: Any) -> Any:
        def run(records: Any) -> int:
            frames.append(broker.log.seq)
            position: int = call(records)
            return position

        return run

    broker.log.append, broker.log.append_one = noting(append), noting(append_one)
    with broker.engine.audit.acting(ROOT):
        for act, *arguments in (
            (broker.engine.create_topic, "second", 1),
            (broker.engine.delete_topic, "second"),
            (broker.engine.access.grant, rule(), None),
            (broker.engine.registry.create, Entry(kind="tenant", tenant_id="acme")),
        ):
            frames.clear()
            broker.must(act, *arguments)
            assert len(frames) == 2, (act, frames)
            assert len(set(frames)) == 1, (act, frames)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_keeps_a_change_and_its_row_or_neither(broker: Broker, flavour: str) -> None:
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "kept", 1)
        broker.submit(broker.engine.create_topic, "doubtful", 1)
    broker.crash(flavour)
    named = [row["resource"] for row in rows(broker)]
    assert ("topic:doubtful" in named) == ("doubtful" in broker.state.topics)
    assert "topic:kept" in named


def test_rows_older_than_the_retention_are_removed() -> None:
    limits = Limits(lease_ms=LEASE_MS, audit_retention_ms=1000)
    broker = Broker(FaultyVfs(), limits=limits)
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "old", 1)
    broker.pass_ms(3000)
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "new", 1)
    broker.engine.parts.retention.run(broker.clock.now_ms())
    broker.settle()
    assert [row["resource"] for row in rows(broker)] == ["topic:new"]
    broker.close()


def test_refusals_are_written_at_a_bounded_rate(broker: Broker) -> None:
    with broker.engine.audit.acting(ROOT):
        for _ in range(5 * audit.REFUSALS_AT_ONCE):
            broker.engine.audit.note("topic.delete", "topic:t", DEFAULT_SCOPE, "denied")
        broker.settle()
        assert len(rows(broker)) == audit.REFUSALS_AT_ONCE
        broker.pass_ms(1000)
        broker.engine.audit.note("topic.delete", "topic:t", DEFAULT_SCOPE, "denied")
        broker.settle()
    assert rows(broker)[-1]["unwritten"] == 4 * audit.REFUSALS_AT_ONCE


def test_a_row_that_finds_no_room_fails_no_change(broker: Broker) -> None:
    with broker.engine.audit.acting(ROOT):
        broker.must(broker.engine.create_topic, "first", 1)
    room = [True, False]
    broker.log.has_room = lambda nbytes, *, reserve=False: room.pop(0) if room else True
    with broker.engine.audit.acting(ROOT):
        assert broker.must(broker.engine.create_topic, "second", 1) is True
    assert broker.engine.audit.lost == 1
