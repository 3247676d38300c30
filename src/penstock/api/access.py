"""Access control: what a principal may do, and the rules and roles that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.api.outcomes import Done
from penstock.model.access import AccessRule, AccessVerdict, ResourceKind, Role, VisibleTopics
from penstock.model.permissions import Permission
from penstock.model.principals import Principal
from penstock.model.scopes import Scope


class AccessPart(Protocol):
    """`by` is who asks for a change; None means that there is no access control. Decisions follow
    each change at once, before it is durable."""

    def permissions_on(
        self, principal: Principal, kind: ResourceKind, scope: Scope, name: str
    ) -> frozenset[str]:
        """Returns everything that the principal may do with a resource, which need not exist."""
        ...

    def permissions_over(self, principal: Principal, rule: AccessRule) -> frozenset[str]:
        """Returns what the principal may do with everything that the rule reaches."""
        ...

    def sees_scope(self, principal: Principal, tenant_id: str, namespace: str = "") -> bool:
        """Returns whether the principal may know of the tenant, or of the namespace."""
        ...

    def topics_within(self, principal: Principal, permission: Permission) -> VisibleTopics | None:
        """Returns the topics on which the principal has the permission. None means all."""
        ...

    def explain(
        self,
        principal: Principal,
        permission: Permission,
        kind: ResourceKind,
        scope: Scope,
        name: str,
        done: Done[AccessVerdict],
    ) -> None: ...

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change that may change a decision, in the same turn."""
        ...

    def grant(
        self, rule: AccessRule, by: Principal | None, done: Done[tuple[AccessRule, bool]]
    ) -> None:
        """Gives the rule, and whether this call created it."""
        ...

    def check_grant(self, rule: AccessRule, by: Principal | None) -> None:
        """Raises PermissionDenied unless `by` could grant this rule. For whoever gives the same
        power in another way, as a token with roles."""
        ...

    def check_token_roles(self, tenant_id: str, roles: Iterable[str]) -> None:
        """Raises InvalidArgument if one of `roles` is not a role of the tenant."""
        ...

    def check_name(self, tenant_id: str, principal: str, by: Principal | None) -> None:
        """Raises PermissionDenied unless `by` could grant every rule that the tenant has for this
        principal. For whoever makes a token in its name."""
        ...

    def revoke(self, rule_id: int, by: Principal | None, done: Done[None]) -> None: ...

    def rules(self, done: Done[list[AccessRule]]) -> None:
        """Gives the rules of all tenants, in the order of their creation."""
        ...

    def set_role(self, role: Role, by: Principal | None, done: Done[Role]) -> None: ...

    def remove_role(
        self, tenant_id: str, name: str, by: Principal | None, done: Done[None]
    ) -> None: ...

    def roles(self, tenant_id: str, done: Done[list[Role]]) -> None:
        """Gives the roles of a tenant, those that are built in first."""
        ...
