"""What travels beside a message's key and value: workflow identity, routing controls, policy.

The wire's field names are used everywhere. An envelope is stored in normal form: empty strings
and an empty retry policy are left out (msgspec drops what equals its default), so that what a
consumer sees has no empty members, while `partition_override: 0` stays.
"""

from __future__ import annotations

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """`max_attempts` 0: no limit; `max_backoff_ms` 0: capped at a day."""

    max_attempts: int = 0
    backoff_ms: int = 0
    max_backoff_ms: int = 0


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a dead letter came from and why it died; only the broker writes it. `retry_policy` was
    the message's: it does not act here, and comes back when the message is replayed."""

    original_topic: str
    original_partition: int
    original_offset: int
    group: str
    attempts: int
    last_error: str
    routed_at_ms: int
    retry_policy: RetryPolicy | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    run_id: str = ""
    step_id: str = ""
    parent_step_id: str = ""
    tenant_id: str = ""
    idempotency_key: str = ""
    target_topic: str = ""
    partition_override: int | None = None
    deadline: str = ""
    retry_policy: RetryPolicy | None = None
    dlq: DeadLetter | None = None


class Routing(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the router said of a message; informational."""

    label: str = ""
    meta: dict[str, str] = {}


class RoutingDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router's answer. Absent members leave the producer's choice in force."""

    label: str = ""
    target_topic: str | None = None
    partition_override: int | None = None
    meta: dict[str, str] | None = None
