"""Rules to change access rules and roles.

Invariant: nobody grants, or takes away, more than they have: neither permissions nor reach.
Deciding changes nothing: it returns records or raises.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.core.access import AccessRules, expanded, permissions_over, subject_of
from penstock.core.tenancy import Registry, find
from penstock.model.access import ANY, BROKER, KINDS, AccessRule, Role, split_resource
from penstock.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from penstock.model.limits import (
    MAX_DEFINED_ROLES,
    MAX_RULE_PERMISSIONS,
    MAX_RULES,
    MAX_SUBJECT_RULES,
)
from penstock.model.names import clean_name
from penstock.model.permissions import ALL_PERMISSIONS, BROKER_PERMISSIONS, BUILT_IN_ROLES
from penstock.model.principals import Principal, bound_elsewhere
from penstock.model.records import RoleRemoved, RoleSet, RuleGranted, RuleRevoked
from penstock.model.scopes import Scope

MAX_SHOWN_ROLES = 20
"""A refusal that lists more roles than this is harder to read than the list of roles."""

_KNOWN = f"there are {', '.join(sorted(ALL_PERMISSIONS))}"


def decide_grant(
    access: AccessRules, registry: Registry, wanted: AccessRule, by: Principal | None, now_ms: int
) -> RuleGranted | AccessRule:
    """Returns the rule that exists already, if an equal one does. `by` None: there is no access
    control, and anybody may prepare rules."""
    _check_authority(access, wanted, by)
    wanted = _checked(access, registry, wanted)
    check_grantor(access, wanted, by)
    of_subject = access.of_subject(*subject_of(wanted))
    count = 0
    for rule in of_subject:
        count += 1
        if msgspec.structs.replace(rule, id=0, created_ms=0) == wanted:
            return rule
    if len(access.rules) >= MAX_RULES:
        raise ResourceExhausted(
            f"the broker keeps at most {MAX_RULES} rules; revoke some", limit="rules"
        )
    if count >= MAX_SUBJECT_RULES:
        raise ResourceExhausted(
            f"{wanted.principal or wanted.role!r} has {MAX_SUBJECT_RULES} rules in this tenant; "
            "use patterns or roles instead",
            limit="subject_rules",
        )
    rule = msgspec.structs.replace(wanted, id=access.revision + 1, created_ms=now_ms)
    return RuleGranted(now_ms, rule)


def decide_revoke(
    access: AccessRules, rule_id: int, by: Principal | None, now_ms: int
) -> RuleRevoked:
    rule = access.rules.get(rule_id)
    if rule is None:
        # Others must not find out which rules exist.
        if by is not None and not (by.is_admin and by.tenant_id is None):
            raise _cannot(by, "remove", {"access"})
        raise NotFound(f"there is no rule {rule_id}")
    check_grantor(access, rule, by, "remove")
    return RuleRevoked(now_ms, rule_id)


def decide_set_role(
    access: AccessRules, registry: Registry, role: Role, by: Principal | None, now_ms: int
) -> RoleSet | None:
    """Returns None if the role is so already. A role may be given anywhere in its tenant, so only
    somebody who has all of its permissions there may change it."""
    name = clean_name(role.name, "role")
    if name in BUILT_IN_ROLES or name in ALL_PERMISSIONS:
        raise InvalidArgument(f"{name!r} is the name of a built-in role or of a permission")
    _check_role_editor(access, Role(tenant_id=role.tenant_id, name=name), None, by)
    if role.tenant_id:
        find(registry, "tenant", (role.tenant_id, "", ""))
    unknown = set(role.permissions) - ALL_PERMISSIONS
    if unknown or not 1 <= len(role.permissions) <= MAX_RULE_PERMISSIONS:
        raise InvalidArgument(f"permissions: give 1 to {MAX_RULE_PERMISSIONS} of them; {_KNOWN}")
    old = access.roles.get((role.tenant_id, name))
    role = Role(
        tenant_id=role.tenant_id, name=name, permissions=tuple(sorted(set(role.permissions)))
    )
    _check_role_editor(access, role, old, by)
    if role == old:
        return None
    if old is None and len(access.roles) >= MAX_DEFINED_ROLES:
        raise ResourceExhausted(
            f"the broker keeps at most {MAX_DEFINED_ROLES} roles; delete some", limit="roles"
        )
    return RoleSet(now_ms, role)


def decide_remove_role(
    access: AccessRules, tenant_id: str, name: str, by: Principal | None, now_ms: int
) -> RoleRemoved:
    if name in BUILT_IN_ROLES:
        raise InvalidArgument(f"the role {name!r} is built in")
    role = access.roles.get((tenant_id, name))
    _check_role_editor(access, Role(tenant_id=tenant_id, name=name), role, by)
    if role is None:
        raise NotFound(f"there is no role {name!r}")
    used = [r.id for r in access.rules.values() if r.tenant_id == tenant_id and name in
            (r.role, *r.permissions)]  # fmt: skip
    if used:
        raise FailedPrecondition(f"rule {used[0]} names the role {name!r}; remove the rule first")
    return RoleRemoved(now_ms, tenant_id, name)


def _checked(access: AccessRules, registry: Registry, rule: AccessRule) -> AccessRule:
    """Returns the rule in normal form, or raises."""
    if bool(rule.principal) == bool(rule.role):
        raise InvalidArgument("a rule is for a principal or for a role: give one of them")
    if not 1 <= len(rule.permissions) <= MAX_RULE_PERMISSIONS:
        raise InvalidArgument(f"permissions: give 1 to {MAX_RULE_PERMISSIONS} names")
    known = ALL_PERMISSIONS | BUILT_IN_ROLES.keys()
    for each in rule.permissions:
        if each not in known and (rule.tenant_id, each) not in access.roles:
            raise NotFound(f"there is no permission or role {each[:200]!r}; {_KNOWN}")
    namespace = _clean_pattern(rule.namespace, "namespace")
    resource = _clean_resource(rule.resource)
    if resource == BROKER:
        if rule.tenant_id or namespace != ANY:
            raise InvalidArgument("a rule for the broker has no tenant and no namespace")
    elif only_broker := sorted(BROKER_PERMISSIONS & set(rule.permissions)):
        raise InvalidArgument(
            f"{only_broker[0]} is about the broker only: give it in a rule without a tenant and "
            "with the resource broker (-r broker)"
        )
    elif not rule.tenant_id:
        raise InvalidArgument("a rule names its tenant, unless its resource is broker")
    elif rule.tenant_id.endswith(ANY) and (rule.tenant_id, "", "") not in registry.tenants:
        raise InvalidArgument("a rule is for one tenant: tenant_id cannot be a pattern")
    else:
        find(registry, "tenant", (rule.tenant_id, "", ""))
        if not namespace.endswith(ANY):
            find(registry, "namespace", (rule.tenant_id, namespace, ""))
    return AccessRule(
        tenant_id=rule.tenant_id,
        namespace=namespace,
        resource=resource,
        principal=clean_name(rule.principal, "principal") if rule.principal else "",
        role=clean_name(rule.role, "role") if rule.role else "",
        permissions=tuple(sorted(set(rule.permissions))),
    )


def _clean_resource(resource: str) -> str:
    if resource in (ANY, BROKER):
        return resource
    kind, pattern = split_resource(resource)
    if kind not in KINDS or kind == BROKER:
        kinds = ", ".join(sorted(KINDS - {BROKER}))
        raise InvalidArgument(
            f"resource {resource[:200]!r} must be *, or a kind and a name as topic:orders or "
            f"topic:orders*; kinds are {kinds}; and broker, without a tenant"
        )
    return f"{kind}:{_clean_pattern(pattern, 'resource')}"


def _clean_pattern(pattern: str, what: str) -> str:
    cleaned = clean_name(pattern, what)
    if ANY in cleaned[:-1]:
        raise InvalidArgument(
            f"{what} {cleaned[:200]!r}: a pattern is *, or the beginning of a name and then *, as "
            "orders*"
        )
    return cleaned


def _check_authority(access: AccessRules, wanted: AccessRule, by: Principal | None) -> None:
    """Raises PermissionDenied if `by` may grant nothing in this scope. Called first, so that a
    refusal does not reveal what exists."""
    if by is not None:
        resource = _clean_resource(wanted.resource)
        namespace = clean_name(wanted.namespace, "namespace")
        if "access" not in permissions_over(access, by, wanted.tenant_id, namespace, resource):
            raise _cannot(by, "grant", {"access"}, (wanted.tenant_id, namespace))


def check_token_roles(access: AccessRules, tenant_id: str, roles: Iterable[str]) -> None:
    """Raises if a token for the tenant names a role that means nothing there: no role has this
    name, and no rule is for it."""
    for name in roles:
        is_role = name in BUILT_IN_ROLES or (tenant_id, name) in access.roles
        if is_role or any(True for _ in access.of_subject(tenant_id, "role", name)):
            continue
        own = sorted(role for tenant, role in access.roles if tenant == tenant_id)
        there_are = ", ".join([*BUILT_IN_ROLES, *own[:MAX_SHOWN_ROLES]])
        raise InvalidArgument(
            f"the tenant {tenant_id!r} has no role {name[:200]!r}; there are {there_are}. Create "
            "it first (penstock access role set), or a rule for it (penstock access grant --role)"
        )


def check_grantor(
    access: AccessRules, rule: AccessRule, by: Principal | None, verb: str = "grant"
) -> None:
    """Raises unless `by` has `access`, and all that the rule gives, on all that it reaches."""
    if by is None:
        return
    namespace, resource = rule.namespace, rule.resource
    held = permissions_over(access, by, rule.tenant_id, namespace, resource)
    if "access" not in held:
        # Others must not find out what the rule gives.
        raise _cannot(by, verb, {"access"})
    missing = _reachable_by(access, rule) - held
    if missing:
        raise _cannot(by, verb, missing)


def _reachable_by(access: AccessRules, rule: AccessRule) -> set[str]:
    """Returns every permission that the rule can lead to: its own, those of its roles, and those of
    the rules for these roles."""
    found: set[str] = set()
    waiting, seen = [rule], {rule.id}
    while waiting:
        each = waiting.pop()
        found |= expanded(access, each)
        for role in each.permissions:
            for other in access.of_subject(rule.tenant_id, "role", role):
                if other.id not in seen:
                    seen.add(other.id)
                    waiting.append(other)
    return found


def _check_role_editor(
    access: AccessRules, role: Role, old: Role | None, by: Principal | None
) -> None:
    if by is None:
        return
    resource = ANY if role.tenant_id else BROKER
    held = permissions_over(access, by, role.tenant_id, ANY, resource)
    before = () if old is None else old.permissions
    if "access" not in held:
        raise _cannot(by, "change", {"access"}, (role.tenant_id, ""))
    missing = {*role.permissions, *before} - held
    if missing:
        raise _cannot(by, "change", missing)


def _cannot(
    by: Principal, verb: str, missing: set[str], scope: Scope = ("", "")
) -> PermissionDenied:
    elsewhere = bound_elsewhere(by, scope) if scope[0] else ""
    return PermissionDenied(
        f"{by.name!r} cannot {verb} this: it lacks {', '.join(sorted(missing))} on all of it, and "
        f"nobody can give or take what they do not have{elsewhere}"
    )
