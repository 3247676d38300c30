"""Permissions and roles: the names of what a principal may do.

Invariant: a permission is one of PERMISSIONS, and a role is a named set of them. A name is never
both, so that a rule can list permissions and roles together.
"""

from __future__ import annotations

from typing import Literal, get_args

Permission = Literal[
    "produce",
    "consume",
    "publish",
    "subscribe",
    "cache_read",
    "cache_write",
    "read",
    "write",
    "manage",
    "journal",
    "registry",
    "access",
    "metrics",
    "audit",
]

PERMISSIONS: dict[Permission, str] = {
    "produce": "Produce messages to a topic, and stage rows for it.",
    "consume": "Consume a topic, settle its deliveries, and use its effects.",
    "publish": "Publish events to a stream.",
    "subscribe": "Subscribe to a stream.",
    "cache_read": "Read and watch the entries of a cache.",
    "cache_write": "Change the entries of a cache, and stage rows for it.",
    "read": "Describe a resource, and read the ranges and offsets of a topic.",
    "write": "Stage, commit and drop batches under a producer's name.",
    "manage": "Create, change and delete topics, groups, streams and caches; publish progress.",
    "journal": "Read the journal's rows of a topic or durable stream.",
    "registry": "Create and delete namespaces; for the broker: tenants, and the whole registry.",
    "access": "Read and change rules and roles.",
    "metrics": "Read the broker's metrics.",
    "audit": "Read the audit log.",
}
"""Every permission, and what it allows."""

ALL_PERMISSIONS: frozenset[str] = frozenset(get_args(Permission))
BROKER_PERMISSIONS: frozenset[str] = frozenset({"metrics"})
"""Permissions that say nothing in a rule for a tenant. A role may have them."""

NO_PERMISSIONS: frozenset[str] = frozenset()

_READER = frozenset({"read", "subscribe", "cache_read", "journal"})
_WRITER = _READER | {"produce", "consume", "publish", "cache_write", "write"}
_OPERATOR = _WRITER | {"manage", "registry", "metrics"}

BUILT_IN_ROLES: dict[str, frozenset[str]] = {
    "reader": _READER,
    "writer": _WRITER,
    "operator": _OPERATOR,
    "admin": ALL_PERMISSIONS,
}
"""Roles that every tenant has. They cannot be changed."""
