"""The audit log: who changed what. Its rows are the messages of a topic of the broker's own."""

from __future__ import annotations

from typing import Literal

import msgspec

AUDIT_TOPIC = "penstock.audit"
"""The reserved name of the topic. Nobody but the broker creates, changes or writes it."""

AuditOutcome = Literal["ok", "denied", "forwarded"]


class Actor(msgspec.Struct, frozen=True):
    """The sender of a request that changes something, and the address that it came from."""

    principal: str
    address: str = ""


BROKER_ACTOR = Actor("broker")
"""Changes that the broker makes by itself when it starts: what its configuration file declares, and
the first admin token. It has no address, which no sender can imitate."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a message of the audit topic. `action` is a noun and a verb: `topic.create`.
    `unwritten` counts refused attempts before this one that were too many to write down."""

    principal: str
    address: str
    action: str
    resource: str
    tenant_id: str = ""
    namespace: str = ""
    outcome: AuditOutcome = "ok"
    detail: str = ""
    unwritten: int = 0
