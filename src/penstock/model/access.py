"""Access rules and roles, the resources that rules name, and how a name matches a pattern.

A rule gives one principal, or all who hold a role, permissions on resources of one tenant. A
namespace or a resource may be a pattern: `*`, or a beginning followed by `*`. A tenant never is. A
rule without a tenant is about the broker itself, which belongs to no tenant.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from penstock.model.scopes import Scope

ResourceKind = Literal["topic", "stream", "cache", "producer", "namespace", "tenant", "broker"]
"""A namespace belongs to itself and a tenant to the namespace "", which only `*` matches."""

KINDS: frozenset[str] = frozenset(get_args(ResourceKind))

ANY = "*"
BROKER = "broker"
BROKER_SCOPE: Scope = ("", "")
"""The scope of the broker itself. No tenant has an empty name."""


class AccessRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`resource` is `*`, or a kind and a pattern for names, as in `topic:orders*`. Either
    `principal` or `role` says who it is for. `permissions` has names of permissions and of roles.
    An `id` is never used again."""

    id: int = 0
    tenant_id: str = ""
    namespace: str = ANY
    resource: str = ANY
    principal: str = ""
    role: str = ""
    permissions: tuple[str, ...] = ()
    created_ms: int = 0


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of permissions, for the rules of one tenant. `tenant_id` "" is the broker."""

    tenant_id: str = ""
    name: str
    permissions: tuple[str, ...] = ()


class AccessVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether something is allowed, and why. `rule` is the one that allows it, if one does."""

    allowed: bool
    reason: str
    rule: AccessRule | None = None


class TopicPattern(msgspec.Struct, frozen=True):
    """`kind` is `topic`, `stream` for the topics that keep the events of streams, or `*`."""

    tenant_id: str
    namespace: str
    kind: str
    name: str


class VisibleTopics(msgspec.Struct, frozen=True):
    """The topics, and the durable streams, that a principal may see something of. Threads may use
    it."""

    patterns: tuple[TopicPattern, ...] = ()

    def includes(self, scope: Scope, name: str, kind: str = "topic") -> bool:
        tenant, namespace = scope
        return any(
            each.tenant_id == tenant
            and each.kind in (ANY, kind)
            and matches(each.namespace, namespace)
            and matches(each.name, name)
            for each in self.patterns
        )


def matches(pattern: str, name: str) -> bool:
    """Returns whether the name, which is no pattern, matches."""
    if pattern.endswith(ANY):
        return name.startswith(pattern[:-1])
    return name == pattern


def covers(pattern: str, other: str) -> bool:
    """Returns whether everything that matches the pattern `other` matches `pattern` too."""
    if other.endswith(ANY):
        return pattern.endswith(ANY) and other[:-1].startswith(pattern[:-1])
    return matches(pattern, other)


def split_resource(resource: str) -> tuple[str, str]:
    """Returns the kind and the pattern for names. Both are `*` for every resource."""
    if resource == ANY:
        return ANY, ANY
    kind, _, name = resource.partition(":")
    return kind, name


def is_on(rule: AccessRule, kind: str, namespace: str, name: str) -> bool:
    """Returns whether the rule reaches this resource of its tenant."""
    rule_kind, pattern = split_resource(rule.resource)
    if rule_kind == ANY:
        return matches(rule.namespace, namespace)
    return rule_kind == kind and matches(rule.namespace, namespace) and matches(pattern, name)


def is_over(rule: AccessRule, namespace: str, resource: str) -> bool:
    """Returns whether the rule reaches everything that these patterns reach in its tenant."""
    rule_kind, pattern = split_resource(rule.resource)
    kind, name = split_resource(resource)
    if rule_kind not in (ANY, kind) or (rule_kind != ANY and kind == ANY):
        return False
    return covers(rule.namespace, namespace) and covers(pattern, name)


def narrower(pattern: str, other: str) -> str | None:
    """Returns the pattern for what matches both; None if nothing does."""
    if covers(pattern, other):
        return other
    return pattern if covers(other, pattern) else None


def intersection(rule: AccessRule, other: AccessRule) -> AccessRule | None:
    """Returns `other`, narrowed down to what `rule` reaches too; None if nothing is left."""
    (kind, name), (other_kind, other_name) = map(split_resource, (rule.resource, other.resource))
    namespace, both = narrower(rule.namespace, other.namespace), narrower(name, other_name)
    if namespace is None or both is None or (ANY not in (kind, other_kind) and kind != other_kind):
        return None
    found = other_kind if kind == ANY else kind
    resource = ANY if found == ANY else f"{found}:{both}" if both else found
    return msgspec.structs.replace(other, namespace=namespace, resource=resource)
