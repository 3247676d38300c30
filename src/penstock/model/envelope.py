"""The envelope of a message: workflow ids, routing controls and retry policy.

Field names are those of the wire. An envelope is stored in normal form: empty strings and an empty
retry policy are left out (msgspec omits defaults), so that a consumer sees no empty members, while
`partition_override: 0` stays.
"""

from __future__ import annotations

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A `max_attempts` of 0 means no limit; a `max_backoff_ms` of 0 means one day."""

    max_attempts: int = 0
    backoff_ms: int = 0
    max_backoff_ms: int = 0


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The origin of a dead letter and why it failed; only the broker writes it. `retry_policy` is
    that of the original message: it does not apply to the dead letter, and is restored when the
    message is replayed."""

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
    """The router's label and data for a message. Informational."""

    label: str = ""
    meta: dict[str, str] = {}


class RoutingDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A router's answer. The producer's choice stands for members that are absent."""

    label: str = ""
    target_topic: str | None = None
    partition_override: int | None = None
    meta: dict[str, str] | None = None
