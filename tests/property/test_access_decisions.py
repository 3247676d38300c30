"""Access decisions under random rules: the cache, the reach and the grants, against plain words."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.access import (
    AccessRules,
    explain,
    permissions_on,
    permissions_over,
    sees_scope,
    topics_within,
)
from penstock.core.access_changes import decide_grant
from penstock.core.tenancy import Registry
from penstock.engine.access import AccessCommands
from penstock.model.access import BROKER_SCOPE, AccessRule, Role, covers, matches, narrower
from penstock.model.errors import PenstockError, PermissionDenied
from penstock.model.permissions import ALL_PERMISSIONS, BUILT_IN_ROLES, Permission
from penstock.model.principals import Principal
from penstock.model.records import RuleGranted
from penstock.model.scopes import Scope
from penstock.model.tenancy import Entry
from tests.engine.harness import Broker

TENANTS = ["default", "acme"]
NAMESPACES = ["default", "dev", "prod"]
NAMES = ["a", "ab", "abc", "b", "a*"]
SOME: list[Permission] = ["produce", "read", "access", "journal"]
ROLES = ["reader", "team", "crew"]
WHO = ["ann", "bob"]

patterns = st.sampled_from(["*", "a", "a*", "ab*", "abc", "b"])
resources = st.one_of(
    st.just("*"),
    st.builds(lambda kind, name: f"{kind}:{name}", st.sampled_from(["topic", "cache"]), patterns),
)
rules = st.builds(
    lambda subject, permissions, **members: AccessRule(
        **members, **subject, permissions=tuple(sorted(permissions))
    ),
    subject=st.one_of(
        st.builds(lambda who: {"principal": who}, st.sampled_from(WHO)),
        st.builds(lambda role: {"role": role}, st.sampled_from(ROLES)),
    ),
    permissions=st.sets(st.sampled_from([*SOME, *ROLES]), min_size=1, max_size=3),
    tenant_id=st.sampled_from(TENANTS),
    namespace=st.sampled_from(["*", "d*", "default", "dev", "p*"]),
    resource=resources,
)
principals = st.builds(
    Principal,
    name=st.sampled_from(WHO),
    tenant_id=st.sampled_from([None, *TENANTS]),
    namespace=st.sampled_from([None, None, "dev"]),
    # Tokens may name roles that there are not, and permissions, which are no roles.
    roles=st.frozensets(st.sampled_from([*ROLES, "journal", "read", "absent"]), max_size=3),
    is_admin=st.sampled_from([False, False, False, True]),
)
places = st.tuples(
    st.sampled_from(["topic", "cache"]),
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(NAMESPACES)),
    st.sampled_from(NAMES),
)
definitions = st.fixed_dictionaries(
    {name: st.sets(st.sampled_from(SOME), min_size=1) for name in ("team", "crew")}
)


def access_of(found: list[AccessRule], roles: dict[str, set[str]]) -> AccessRules:
    access = AccessRules()
    for tenant in TENANTS:
        for name, permissions in roles.items():
            access.set_role(Role(tenant_id=tenant, name=name, permissions=tuple(permissions)))
    for number, rule in enumerate(found, 100):
        access.grant(replaced(rule, id=number))
    return access


def replaced(rule: AccessRule, **changes: Any) -> AccessRule:
    return AccessRule(**{name: getattr(rule, name) for name in rule.__struct_fields__} | changes)


def plain(access: AccessRules, who: Principal, kind: str, scope: Scope, name: str) -> set[str]:
    """The decision in the words of the documentation, without any index."""
    tenant, namespace = scope
    if who.tenant_id not in (None, tenant) or who.namespace not in (None, namespace):
        return set()
    if who.is_admin:
        return set(ALL_PERMISSIONS)

    def of_role(role: str) -> set[str]:
        defined = access.roles.get((tenant, role))
        return set(BUILT_IN_ROLES.get(role) or (defined.permissions if defined else ()))

    held: set[str] = set()
    roles = set(who.roles)
    if who.tenant_id is not None:
        held = {each for role in roles for each in of_role(role)}
    while True:
        before = (len(held), len(roles))
        for rule in access.rules.values():
            kind_there, _, pattern = rule.resource.partition(":")
            if (
                rule.tenant_id == tenant
                and matches(rule.namespace, namespace)
                and (rule.resource == "*" or (kind_there == kind and matches(pattern, name)))
                and (rule.principal == who.name or rule.role in roles)
            ):
                for each in rule.permissions:
                    if each in ALL_PERMISSIONS:
                        held.add(each)
                    else:
                        roles.add(each)
                        held |= of_role(each)
        if before == (len(held), len(roles)):
            return held


@settings(max_examples=300)
@given(st.lists(rules, max_size=6), definitions, principals, places)
def test_a_decision_is_what_the_words_say(
    found: list[AccessRule], roles: dict[str, set[str]], who: Principal, place: Any
) -> None:
    """felix-93, felix-96, felix-97"""
    access = access_of(found, roles)
    kind, scope, name = place
    expected = plain(access, who, kind, scope, name)
    assert permissions_on(access, who, kind, scope, name) == expected
    for permission in SOME:
        verdict = explain(access, who, permission, kind, scope, name)
        assert verdict.allowed == (permission in expected), verdict
    if kind in ("topic", "stream"):
        reach = topics_within(access, who, "journal")
        is_within = reach is None or reach.includes(scope, name, kind)
        assert is_within == ("journal" in expected)
    if expected:
        assert sees_scope(access, who, scope[0], "")
        assert sees_scope(access, who, *scope)


@settings(max_examples=300)
@given(st.lists(rules, max_size=6), definitions, principals, rules, places)
def test_nobody_grants_more_than_they_have(
    found: list[AccessRule],
    roles: dict[str, set[str]],
    who: Principal,
    wanted: AccessRule,
    place: Any,
) -> None:
    """Whoever gets the new rule can then do nothing with a resource that it reaches, beyond what
    they could before, that the grantor could not."""
    access = access_of(found, roles)
    registry = Registry()
    for entry in (
        Entry(kind="tenant", tenant_id="acme"),
        *(Entry(kind="namespace", tenant_id=t, namespace=n) for t in TENANTS for n in NAMESPACES),
    ):
        registry.put(entry)
    try:
        decision = decide_grant(access, registry, wanted, who, 1)
    except PermissionDenied:
        return
    except PenstockError as error:
        raise AssertionError(error) from error
    if not isinstance(decision, RuleGranted):
        return
    kind, scope, name = place
    grantees = [Principal(each, roles=frozenset(r)) for each in WHO for r in ([], ["team"])]
    before = [permissions_on(access, each, kind, scope, name) for each in grantees]
    held = permissions_on(access, who, kind, scope, name)
    access.grant(decision.rule)
    for each, had in zip(grantees, before, strict=True):
        gained = permissions_on(access, each, kind, scope, name) - had
        assert gained <= held, (each, gained, held)


@given(st.lists(rules, max_size=6), definitions, principals, rules, places)
def test_permissions_over_a_pattern_hold_for_all_that_it_reaches(
    found: list[AccessRule],
    roles: dict[str, set[str]],
    who: Principal,
    over: AccessRule,
    place: Any,
) -> None:
    access = access_of(found, roles)
    kind, scope, name = place
    kind_there, _, pattern = over.resource.partition(":")
    is_reached = (
        scope[0] == over.tenant_id
        and matches(over.namespace, scope[1])
        and (over.resource == "*" or (kind == kind_there and matches(pattern, name)))
    )
    if is_reached:
        held = permissions_over(access, who, over.tenant_id, over.namespace, over.resource)
        assert held <= permissions_on(access, who, kind, scope, name)


@given(patterns, patterns, st.sampled_from(NAMES))
def test_patterns_cover_and_narrow(one: str, other: str, name: str) -> None:
    if covers(one, other) and matches(other, name):
        assert matches(one, name)
    both = narrower(one, other)
    is_both = matches(one, name) and matches(other, name)
    assert is_both == (both is not None and matches(both, name))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_cache_never_differs_from_the_rules(data: st.DataObject) -> None:
    """Any history of grants, revocations, roles and deletions, and questions in between."""
    broker = Broker()
    try:
        access: AccessCommands = broker.engine.access
        registry = broker.engine.registry
        for tenant in TENANTS:
            broker.must(registry.create, Entry(kind="tenant", tenant_id=tenant))
            for each in NAMESPACES:
                entry = Entry(kind="namespace", tenant_id=tenant, namespace=each)
                broker.must(registry.create, entry)
        for tenant in TENANTS:
            for name in ("team", "crew"):
                role = Role(tenant_id=tenant, name=name, permissions=("read",))
                broker.must(access.set_role, role, None)
        questions: list[tuple[Principal, Any]] = data.draw(
            st.lists(st.tuples(principals, places), min_size=3, max_size=8)
        )
        for _ in range(data.draw(st.integers(1, 12))):
            change = data.draw(st.sampled_from(["grant", "grant", "revoke", "role", "delete"]))
            if change == "grant":
                broker.call(access.grant, data.draw(rules), None)
            elif change == "revoke" and broker.state.access.rules:
                rule_id = data.draw(st.sampled_from(sorted(broker.state.access.rules)))
                broker.must(access.revoke, rule_id, None)
            elif change == "role":
                permissions = tuple(data.draw(st.sets(st.sampled_from(SOME), min_size=1)))
                role = Role(tenant_id="acme", name="team", permissions=permissions)
                broker.must(access.set_role, role, None)
            elif change == "delete":
                path = ("acme", data.draw(st.sampled_from(NAMESPACES)), "")
                broker.call(registry.delete, "namespace", path, True)
            for who, (kind, scope, name) in questions:
                cached = access.permissions_on(who, kind, scope, name)
                assert cached == plain(broker.state.access, who, kind, scope, name)
    finally:
        broker.close()


def test_the_broker_itself_is_in_nobodys_tenant() -> None:
    """felix-96: an admin of a tenant has no right on the broker."""
    access = AccessRules()
    access.grant(AccessRule(id=1, resource="broker", principal="ann", permissions=("metrics",)))
    asked = ("broker", BROKER_SCOPE, "")
    assert permissions_on(access, Principal("ann"), *asked) == {"metrics"}
    bound = Principal("ann", tenant_id="default", is_admin=True)
    assert permissions_on(access, bound, *asked) == frozenset()
    assert permissions_on(access, Principal("root", is_admin=True), *asked) == ALL_PERMISSIONS
