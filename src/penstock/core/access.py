"""The access rules and roles, and what they allow.

Invariants: nothing is allowed that no rule, no role of the token and no admin right allows. A
principal never reaches beyond the tenant and the namespace that it is bound to. `revision` counts
every change: while it is the same, so is every answer. Must not know requests, nor caches of
answers; access_changes.py decides who may change what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from penstock.model.access import (
    ANY,
    AccessRule,
    AccessVerdict,
    Role,
    TopicPattern,
    VisibleTopics,
    intersection,
    is_on,
    is_over,
    matches,
    split_resource,
)
from penstock.model.permissions import ALL_PERMISSIONS, BUILT_IN_ROLES, NO_PERMISSIONS
from penstock.model.principals import Principal
from penstock.model.scopes import Scope

Subject = tuple[str, str, str]
"""Tenant, `principal` or `role`, and the name."""


class AccessSnapshot(msgspec.Struct, array_like=True):
    revision: int
    rules: list[AccessRule]
    roles: list[Role]


class AccessRules:
    __slots__ = ("by_subject", "revision", "roles", "rules")

    def __init__(self) -> None:
        self.rules: dict[int, AccessRule] = {}
        self.roles: dict[tuple[str, str], Role] = {}
        self.by_subject: dict[Subject, dict[int, AccessRule]] = {}
        self.revision = 0

    def grant(self, rule: AccessRule) -> None:
        self.revision += 1
        self._add(rule)

    def revoke(self, rule_id: int) -> None:
        self.revision += 1
        self._remove(self.rules[rule_id])

    def set_role(self, role: Role) -> None:
        self.revision += 1
        self.roles[role.tenant_id, role.name] = role

    def remove_role(self, tenant_id: str, name: str) -> None:
        self.revision += 1
        del self.roles[tenant_id, name]

    def forget(self, tenant_id: str, namespace: str) -> None:
        """Drops what belongs to a deleted tenant, or to a deleted namespace of it: one that is
        created later under the same name begins without rules."""
        self.revision += 1
        for rule in list(self.rules.values()):
            if rule.tenant_id == tenant_id and namespace in ("", rule.namespace):
                self._remove(rule)
        if not namespace:
            for key in [key for key in self.roles if key[0] == tenant_id]:
                del self.roles[key]

    def restore(self, snapshot: AccessSnapshot) -> None:
        self.revision = snapshot.revision
        for rule in snapshot.rules:
            self._add(rule)
        self.roles = {(role.tenant_id, role.name): role for role in snapshot.roles}

    def permissions_of(self, tenant_id: str, name: str) -> frozenset[str]:
        """Returns the permissions of a role. An unknown one has none."""
        built_in = BUILT_IN_ROLES.get(name)
        if built_in is not None:
            return built_in
        role = self.roles.get((tenant_id, name))
        return NO_PERMISSIONS if role is None else frozenset(role.permissions)

    def of_subject(self, tenant_id: str, kind: str, name: str) -> Iterable[AccessRule]:
        return self.by_subject.get((tenant_id, kind, name), _NO_RULES).values()

    def _add(self, rule: AccessRule) -> None:
        self.rules[rule.id] = rule
        self.by_subject.setdefault(subject_of(rule), {})[rule.id] = rule

    def _remove(self, rule: AccessRule) -> None:
        del self.rules[rule.id]
        of_subject = self.by_subject[subject_of(rule)]
        del of_subject[rule.id]
        if not of_subject:
            del self.by_subject[subject_of(rule)]


_NO_RULES: dict[int, AccessRule] = {}


def subject_of(rule: AccessRule) -> Subject:
    if rule.principal:
        return rule.tenant_id, "principal", rule.principal
    return rule.tenant_id, "role", rule.role


def snapshot_of_access(access: AccessRules) -> AccessSnapshot:
    rules = [rule for _, rule in sorted(access.rules.items())]
    roles = [role for _, role in sorted(access.roles.items())]
    return AccessSnapshot(access.revision, rules, roles)


# -- what is allowed -------------------------------------------------------------------------------


def permissions_on(
    access: AccessRules, principal: Principal, kind: str, scope: Scope, name: str
) -> frozenset[str]:
    """Returns everything that the principal may do with this resource."""
    tenant, namespace = scope
    if not _is_reachable(principal, scope):
        return NO_PERMISSIONS
    return _held(access, principal, tenant, lambda rule: is_on(rule, kind, namespace, name))


def permissions_over(
    access: AccessRules, principal: Principal, tenant: str, namespace: str, resource: str
) -> frozenset[str]:
    """Returns what the principal may do with every resource that these patterns can reach."""
    is_bound = principal.namespace is not None and principal.namespace != namespace
    if principal.tenant_id not in (None, tenant) or is_bound:
        return NO_PERMISSIONS
    return _held(access, principal, tenant, lambda rule: is_over(rule, namespace, resource))


def _is_reachable(principal: Principal, scope: Scope) -> bool:
    tenant, namespace = scope
    if principal.tenant_id is None:
        return principal.namespace is None or principal.namespace == namespace
    return principal.tenant_id == tenant and principal.namespace in (None, namespace)


def _held(
    access: AccessRules, principal: Principal, tenant: str, applies: Callable[[AccessRule], bool]
) -> frozenset[str]:
    """Adds up the rules that apply: those for the principal, and those for each role that it has
    from its token or by one of these rules."""
    if principal.is_admin:
        return ALL_PERMISSIONS
    held: set[str] = set()
    if principal.tenant_id is not None:
        for role in principal.roles:
            held |= access.permissions_of(tenant, role)
    for _, rule in _rules_of(access, principal, tenant, applies):
        for each in rule.permissions:
            if each in ALL_PERMISSIONS:
                held.add(each)
            else:
                held |= access.permissions_of(tenant, each)
    return frozenset(held)


def _rules_of(
    access: AccessRules, principal: Principal, tenant: str, applies: Callable[[AccessRule], bool]
) -> Iterable[tuple[str, AccessRule]]:
    """Yields the rules for the principal, each with the role that it is by ("" for none)."""
    roles = sorted(principal.roles, reverse=True)
    waiting = [*(("role", role) for role in roles), ("principal", principal.name)]
    seen = set(waiting)
    while waiting:
        kind, who = waiting.pop()
        for rule in access.of_subject(tenant, kind, who):
            if applies(rule):
                yield (who if kind == "role" else ""), rule
                for each in rule.permissions:
                    if each not in ALL_PERMISSIONS and ("role", each) not in seen:
                        seen.add(("role", each))
                        waiting.append(("role", each))


def explain(
    access: AccessRules, principal: Principal, permission: str, kind: str, scope: Scope, name: str
) -> AccessVerdict:
    """Says whether this is allowed, and by which rule. Agrees with `permissions_on`."""
    tenant, namespace = scope
    who = repr(principal.name)
    if not _is_reachable(principal, scope):
        bound = "/".join(filter(None, (principal.tenant_id, principal.namespace)))
        return AccessVerdict(allowed=False, reason=f"{who} is bound to {bound!r}")
    if principal.is_admin:
        return AccessVerdict(allowed=True, reason=f"{who} is an admin")
    for role in sorted(principal.roles) if principal.tenant_id is not None else ():
        if permission in access.permissions_of(tenant, role):
            return AccessVerdict(allowed=True, reason=f"the token of {who} has the role {role!r}")
    for role, rule in _rules_of(
        access, principal, tenant, lambda rule: is_on(rule, kind, namespace, name)
    ):
        if permission in expanded(access, rule):
            by = f" through the role {role!r}" if role else ""
            reason = f"rule {rule.id} allows it{by}"
            return AccessVerdict(allowed=True, reason=reason, rule=rule)
    return AccessVerdict(allowed=False, reason=f"no rule gives {who} {permission} here")


def topics_within(
    access: AccessRules, principal: Principal, permission: str
) -> VisibleTopics | None:
    """Returns the topics and streams on which the principal has the permission. None means all."""
    bound = principal.namespace
    if principal.is_admin and principal.tenant_id is None and bound is None:
        return None
    if principal.tenant_id is not None:
        tenants = [principal.tenant_id]
    else:
        tenants = sorted({tenant for tenant, _, _ in access.by_subject if tenant})
    found: list[TopicPattern] = []
    for tenant in tenants:
        for rule in _effective_rules(access, principal, tenant):
            kind, name = split_resource(rule.resource)
            if kind not in (ANY, "topic", "stream") or permission not in expanded(access, rule):
                continue
            if bound is None:
                found.append(TopicPattern(tenant, rule.namespace, kind, name))
            elif matches(rule.namespace, bound):
                found.append(TopicPattern(tenant, bound, kind, name))
    return VisibleTopics(tuple(found))


def sees_scope(access: AccessRules, principal: Principal, tenant: str, namespace: str) -> bool:
    """Returns whether the principal has anything to do in the tenant (with namespace "") or in the
    namespace."""
    if principal.tenant_id not in (None, tenant):
        return False
    if namespace and principal.namespace not in (None, namespace):
        return False
    if principal.is_admin or (principal.tenant_id is not None and not namespace):
        return True
    return any(
        (not namespace or matches(rule.namespace, namespace)) and expanded(access, rule)
        for rule in _effective_rules(access, principal, tenant)
    )


def _effective_rules(
    access: AccessRules, principal: Principal, tenant: str
) -> Iterable[AccessRule]:
    """Yields rules that together say what the principal may do in the tenant. A rule for a role
    that the principal has by another rule is narrowed down to what both reach."""
    if principal.is_admin:
        yield AccessRule(tenant_id=tenant, permissions=("admin",))
        return
    if principal.tenant_id is not None:
        # A token may name any text as a role; the name of a permission is no role.
        roles = sorted(principal.roles - ALL_PERMISSIONS)
        yield AccessRule(tenant_id=tenant, permissions=tuple(roles))
    waiting = [*access.of_subject(tenant, "principal", principal.name)]
    for role in principal.roles:
        waiting += access.of_subject(tenant, "role", role)
    seen = set()
    while waiting:
        rule = waiting.pop()
        if (rule.id, rule.namespace, rule.resource) in seen:
            continue
        seen.add((rule.id, rule.namespace, rule.resource))
        yield rule
        for role in rule.permissions:
            both = (intersection(rule, other) for other in access.of_subject(tenant, "role", role))
            waiting += [each for each in both if each is not None]


def expanded(access: AccessRules, rule: AccessRule) -> set[str]:
    """Returns the permissions of a rule, with those of its roles."""
    found: set[str] = set()
    for each in rule.permissions:
        found |= {each} if each in ALL_PERMISSIONS else access.permissions_of(rule.tenant_id, each)
    return found
