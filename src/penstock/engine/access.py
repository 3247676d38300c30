"""Commands on access rules and roles, and a cache of decisions.

Invariant: a decision is what the rules say now. The cache is emptied by every change of them, in
the turn in which it is applied; a deleted tenant or namespace takes its rules with it, so changes
of the registry count too. Listeners hear of each change after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from penstock.api.outcomes import Done
from penstock.core.access import (
    explain,
    permissions_on,
    permissions_over,
    sees_scope,
    topics_within,
)
from penstock.core.access_changes import (
    check_grantor,
    check_token_roles,
    decide_grant,
    decide_remove_role,
    decide_revoke,
    decide_set_role,
)
from penstock.core.state import BrokerState
from penstock.engine.audit import AuditTrail
from penstock.engine.ledger import Ledger
from penstock.model.access import (
    BROKER_SCOPE,
    AccessRule,
    AccessVerdict,
    ResourceKind,
    Role,
    VisibleTopics,
)
from penstock.model.errors import PermissionDenied
from penstock.model.permissions import BUILT_IN_ROLES, Permission
from penstock.model.principals import Principal
from penstock.model.records import Record, RuleGranted
from penstock.model.scopes import Scope
from penstock.model.tenancy import Entry

MAX_DECISIONS = 16_384
"""Decisions in the cache, at most 1 KiB each. Beyond it, the cache begins anew."""

Asked = tuple[Principal, str, Scope, str]


class AccessCommands:
    def __init__(self, state: BrokerState, ledger: Ledger, audit: AuditTrail) -> None:
        self._state = state
        self._access = state.access
        self._ledger = ledger
        self._audit = audit
        self._decisions: dict[Asked, frozenset[str]] = {}
        self._listeners: list[Callable[[], None]] = []

    # -- decisions -----------------------------------------------------------------------------

    def permissions_on(
        self, principal: Principal, kind: ResourceKind, scope: Scope, name: str
    ) -> frozenset[str]:
        asked = (principal, kind, scope, name)
        found = self._decisions.get(asked)
        if found is None:
            if len(self._decisions) >= MAX_DECISIONS:
                self._decisions.clear()
            found = permissions_on(self._access, principal, kind, scope, name)
            self._decisions[asked] = found
        return found

    def permissions_over(self, principal: Principal, rule: AccessRule) -> frozenset[str]:
        return permissions_over(
            self._access, principal, rule.tenant_id, rule.namespace, rule.resource
        )

    def sees_scope(self, principal: Principal, tenant_id: str, namespace: str = "") -> bool:
        return sees_scope(self._access, principal, tenant_id, namespace)

    def topics_within(self, principal: Principal, permission: Permission) -> VisibleTopics | None:
        return topics_within(self._access, principal, permission)

    def explain(
        self,
        principal: Principal,
        permission: Permission,
        kind: ResourceKind,
        scope: Scope,
        name: str,
        done: Done[AccessVerdict],
    ) -> None:
        self._ledger.decide(
            lambda: explain(self._access, principal, permission, kind, scope, name), done
        )

    # -- changes -------------------------------------------------------------------------------

    def when_changed(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def registry_changed(self, entry: Entry, deleted: bool) -> None:
        if deleted and entry.kind in ("tenant", "namespace"):
            self._changed()

    def grant(
        self, rule: AccessRule, by: Principal | None, done: Done[tuple[AccessRule, bool]]
    ) -> None:
        def decide() -> tuple[AccessRule, bool]:
            scope = (rule.tenant_id, rule.namespace)
            with self._noting_refusal("rule.grant", rule.resource, scope):
                decision = decide_grant(
                    self._access, self._state.registry, rule, by, self._ledger.now_ms()
                )
            if isinstance(decision, RuleGranted):
                self._record(decision, "rule.grant", decision.rule)
                return decision.rule, True
            return decision, False

        self._ledger.decide(decide, done)

    def check_grant(self, rule: AccessRule, by: Principal | None) -> None:
        check_grantor(self._access, rule, by)

    def check_token_roles(self, tenant_id: str, roles: Iterable[str]) -> None:
        check_token_roles(self._access, tenant_id, roles)

    def check_name(self, tenant_id: str, principal: str, by: Principal | None) -> None:
        for rule in self._access.of_subject(tenant_id, "principal", principal):
            check_grantor(self._access, rule, by)

    def revoke(self, rule_id: int, by: Principal | None, done: Done[None]) -> None:
        def decide() -> None:
            with self._noting_refusal("rule.revoke", f"rule:{rule_id}", BROKER_SCOPE):
                record = decide_revoke(self._access, rule_id, by, self._ledger.now_ms())
            self._record(record, "rule.revoke", self._access.rules[rule_id])

        self._ledger.decide(decide, done)

    def rules(self, done: Done[list[AccessRule]]) -> None:
        self._ledger.decide(lambda: [rule for _, rule in sorted(self._access.rules.items())], done)

    def set_role(self, role: Role, by: Principal | None, done: Done[Role]) -> None:
        def decide() -> Role:
            with self._noting_refusal("role.set", f"role:{role.name}", (role.tenant_id, "")):
                record = decide_set_role(
                    self._access, self._state.registry, role, by, self._ledger.now_ms()
                )
            if record is not None:
                self._record(record, "role.set", record.role)
                return record.role
            return self._access.roles[role.tenant_id, role.name.strip()]

        self._ledger.decide(decide, done)

    def remove_role(
        self, tenant_id: str, name: str, by: Principal | None, done: Done[None]
    ) -> None:
        def decide() -> None:
            now_ms = self._ledger.now_ms()
            with self._noting_refusal("role.remove", f"role:{name}", (tenant_id, "")):
                record = decide_remove_role(self._access, tenant_id, name, by, now_ms)
            self._record(record, "role.remove", self._access.roles[tenant_id, name])

        self._ledger.decide(decide, done)

    def roles(self, tenant_id: str, done: Done[list[Role]]) -> None:
        def look() -> list[Role]:
            built_in = [
                Role(tenant_id=tenant_id, name=name, permissions=tuple(sorted(permissions)))
                for name, permissions in BUILT_IN_ROLES.items()
            ]
            own = [role for _, role in sorted(self._access.roles.items())]
            return built_in + [role for role in own if role.tenant_id == tenant_id]

        self._ledger.decide(look, done)

    # -- within --------------------------------------------------------------------------------

    def _record(self, record: Record, action: str, what: AccessRule | Role) -> None:
        self._ledger.must_record(record)
        if isinstance(what, AccessRule):
            self._audit.changed_rule(action, what)
        else:
            self._audit.changed_role(action, what)
        self._changed()

    @contextmanager
    def _noting_refusal(self, action: str, resource: str, scope: Scope) -> Iterator[None]:
        try:
            yield
        except PermissionDenied as error:
            self._audit.note(action, resource, scope, "denied", error.message)
            raise

    def _changed(self) -> None:
        self._decisions.clear()
        for listener in self._listeners:
            listener()
