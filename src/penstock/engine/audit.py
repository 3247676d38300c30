"""Writes the audit log: a row for each change that an actor made, in the frame of that change.

The rows are messages of the topic `penstock.audit`, which is created with the first of them. No
actor, no row: without access control nobody knows who changes something. Invariants: a row never
makes a command fail, since its change is recorded already; refused attempts, of which anybody can
make any number, are written at a bounded rate, and the rest is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.core.state import BrokerState
from penstock.core.topics import Topic
from penstock.engine.ledger import Ledger
from penstock.engine.window import Window
from penstock.model.access import AccessRule, Role
from penstock.model.audit import AUDIT_TOPIC, Actor, AuditOutcome, AuditRow
from penstock.model.envelope import Envelope
from penstock.model.errors import PenstockError
from penstock.model.limits import AUDIT_BYTES, AUDIT_MEMORY_BYTES
from penstock.model.records import Message, Record, TopicConfigured, TopicCreated
from penstock.model.scopes import Scope
from penstock.model.tenancy import Entry
from penstock.model.units import utf8_bytes

REFUSALS_A_SECOND = 10
REFUSALS_AT_ONCE = 100
"""The refused attempts that are written down: so many at once, and so many a second later."""

_log = logging.getLogger("penstock.engine")
_encode = msgspec.json.Encoder().encode


class AuditTrail:
    """`lost` counts rows that could not be written."""

    def __init__(
        self, state: BrokerState, ledger: Ledger, window: Window, *, is_in_memory: bool
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._window = window
        self._max_bytes = AUDIT_MEMORY_BYTES if is_in_memory else AUDIT_BYTES
        self._actor: Actor | None = None
        self._refusals_left = float(REFUSALS_AT_ONCE)
        self._refused_ms = 0
        self._unwritten = 0
        self.lost = 0

    @contextmanager
    def acting(self, actor: Actor | None) -> Iterator[None]:
        before, self._actor = self._actor, actor
        try:
            yield
        finally:
            self._actor = before

    def note(
        self, action: str, resource: str, scope: Scope, outcome: AuditOutcome, detail: str = ""
    ) -> None:
        actor = self._actor
        if actor is None or (outcome == "denied" and not self._may_write_refusal()):
            return
        tenant_id, namespace = scope
        row = AuditRow(
            principal=actor.principal,
            address=actor.address,
            action=action,
            resource=resource,
            tenant_id=tenant_id,
            namespace=namespace,
            outcome=outcome,
            detail=detail,
            unwritten=self._unwritten,
        )
        if self._write(row):
            self._unwritten = 0

    # -- called with each change -----------------------------------------------------------------

    def changed(self, action: str, kind: str, scope: Scope, name: str, detail: str = "") -> None:
        if self._actor is not None:
            self.note(action, f"{kind}:{name}", scope, "ok", detail)

    def changed_rule(self, action: str, rule: AccessRule) -> None:
        if self._actor is not None:
            scope = (rule.tenant_id, rule.namespace if rule.tenant_id else "")
            self.note(action, f"rule:{rule.id}", scope, "ok", _encode(rule).decode())

    def changed_role(self, action: str, role: Role) -> None:
        if self._actor is not None:
            scope = (role.tenant_id, "")
            self.note(action, f"role:{role.name}", scope, "ok", ", ".join(role.permissions))

    def registry_changed(self, entry: Entry, verb: str) -> None:
        if self._actor is not None:
            name = entry.name or entry.namespace or entry.tenant_id
            config = entry.stream or entry.cache or entry.quota
            detail = "" if config is None or verb == "delete" else _encode(config).decode()
            if verb == "configure":
                detail = detail or "no quota"
            scope = (entry.tenant_id, entry.namespace)
            self.changed(f"{entry.kind}.{verb}", entry.kind, scope, name, detail)

    # -- within ----------------------------------------------------------------------------------

    def _may_write_refusal(self) -> bool:
        now_ms = self._ledger.now_ms()
        gained = (now_ms - self._refused_ms) * REFUSALS_A_SECOND / 1000
        self._refused_ms = now_ms
        self._refusals_left = min(REFUSALS_AT_ONCE, self._refusals_left + gained)
        if self._refusals_left < 1:
            self._unwritten += 1
            return False
        self._refusals_left -= 1
        return True

    def _write(self, row: AuditRow) -> bool:
        """Appends the row to the open frame, the one of the change that it is about."""
        try:
            if self._ledger.failure is not None:
                raise self._ledger.failure
            topic = self._topic()
            partition = topic.partitions[0]
            value = _encode(row).decode()
            envelope = Envelope(tenant_id=row.tenant_id) if row.tenant_id else None
            now_ms = self._ledger.now_ms()
            message = Message(
                topic.id, partition.index, topic.next_offset, now_ms, row.principal, value, envelope
            )
            size = utf8_bytes(message.key) + utf8_bytes(value)
            self._ledger.store(message, size, reserve=True)
            self._ledger.wake()
        except PenstockError as error:
            self.lost += 1
            _log.error("a row of the audit log is lost: %s: %s", error.message, row)
            return False
        return True

    def _topic(self) -> Topic:
        """Returns the audit topic. Creates it, and gives it the retention in force, if need be."""
        state, now_ms = self._state, self._ledger.now_ms()
        retention = (state.limits.audit_retention_ms, self._max_bytes)
        topic = state.topics.get(AUDIT_TOPIC)
        if topic is not None and (topic.retention_ms, topic.retention_bytes) == retention:
            return topic
        topic_id = state.next_id if topic is None else topic.id
        records: list[Record] = [TopicConfigured(topic_id, now_ms, *retention)]
        if topic is None:
            records.insert(0, TopicCreated(topic_id, now_ms, AUDIT_TOPIC, 1))
        self._ledger.must_record(*records)
        if topic is None:
            self._window.open_topic(topic_id, 1)
        return state.topics[AUDIT_TOPIC]
