"""The envelope of a message: its body on the wire, and its normal form.

Produce requests and the rows of writes have one. Must not know requests.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_ENVELOPE_FIELD_BYTES, MAX_OFFSET, MAX_PARTITIONS
from penstock.model.names import clean_name
from penstock.model.options import check_number
from penstock.model.units import utf8_bytes
from penstock.server.members import (
    Count,
    Identifier,
    NameOrEmpty,
    StrictBody,
    limits,
    optional,
)

_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt](\d{2}:\d{2}:\d{2})(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})"
)
_EMPTY = Envelope()

_Deadline = Annotated[str, limits(pattern=rf"^\s*{_RFC3339.pattern}\s*$|^$")]
_PartitionIndex = Annotated[int, limits(minimum=0, maximum=MAX_PARTITIONS - 1)]


class RetryPolicyBody(StrictBody):
    max_attempts: Annotated[
        Count | None,
        optional("The most deliveries before the message is dead-lettered; 0 is no limit."),
    ] = None
    backoff_ms: Annotated[
        Count | None,
        optional(
            "The wait before the first retry; it doubles for each further retry. Without "
            "max_attempts, retries never end."
        ),
    ] = None
    max_backoff_ms: Annotated[Count | None, optional("The longest wait; 0 is a day.")] = None


class EnvelopeBody(StrictBody):
    run_id: Annotated[Identifier | None, optional("The workflow run.")] = None
    step_id: Annotated[Identifier | None, optional("The step of the run.")] = None
    parent_step_id: Annotated[Identifier | None, optional("The step that caused this one.")] = None
    tenant_id: Annotated[
        Identifier | None, optional("The tenant. Each tenant has its own idempotency keys.")
    ] = None
    idempotency_key: Annotated[
        Identifier | None, optional("A second message with this key is not stored.")
    ] = None
    target_topic: Annotated[
        NameOrEmpty | None, optional("Stores the message in this topic instead.")
    ] = None
    partition_override: Annotated[
        _PartitionIndex | None, optional("Stores the message in this partition.")
    ] = None
    deadline: Annotated[
        _Deadline | None, optional("RFC 3339 with a zone; a produce after it is refused.")
    ] = None
    retry_policy: RetryPolicyBody | None = None


def envelope_of(body: EnvelopeBody) -> tuple[Envelope | None, int]:
    """The envelope in normal form, None if it is empty; and its deadline in ms."""
    for name in ("run_id", "step_id", "parent_step_id", "tenant_id", "idempotency_key"):
        check_length(getattr(body, name), f"envelope.{name}")
    deadline, deadline_ms = deadline_of(body.deadline)
    envelope = Envelope(
        run_id=body.run_id or "",
        step_id=body.step_id or "",
        parent_step_id=body.parent_step_id or "",
        tenant_id=body.tenant_id or "",
        idempotency_key=body.idempotency_key or "",
        target_topic=target_of(body.target_topic),
        partition_override=_override(body.partition_override),
        deadline=deadline,
        retry_policy=policy_of(body.retry_policy),
    )
    return (None if envelope == _EMPTY else envelope), deadline_ms


def check_length(text: str | None, what: str) -> None:
    if text and utf8_bytes(text) > MAX_ENVELOPE_FIELD_BYTES:
        raise InvalidArgument(f"{what} is longer than {MAX_ENVELOPE_FIELD_BYTES} bytes")


def target_of(raw: str | None) -> str:
    return clean_name(raw, "envelope.target_topic") if raw and raw.strip() else ""


def _override(raw: int | None) -> int | None:
    if raw is not None and not -MAX_OFFSET <= raw <= MAX_OFFSET:
        raise InvalidArgument("partition_override is out of range")
    return raw


def policy_of(body: RetryPolicyBody | None) -> RetryPolicy | None:
    """The policy; None if it neither limits the attempts nor makes them wait."""
    if body is None:
        return None
    policy = RetryPolicy(body.max_attempts or 0, body.backoff_ms or 0, body.max_backoff_ms or 0)
    for name in ("max_attempts", "backoff_ms", "max_backoff_ms"):
        check_number(f"retry_policy.{name}", getattr(policy, name))
    return policy if policy.max_attempts or policy.backoff_ms else None


def deadline_of(raw: str | None) -> tuple[str, int]:
    """The deadline as readers get it, and in ms; ("", 0) without one."""
    if not raw:
        return "", 0
    found = _RFC3339.fullmatch(raw.strip())
    if found is None:
        raise InvalidArgument("deadline must be RFC 3339 with a zone, as 2030-01-31T12:00:00Z")
    day, clock, fraction, zone = found.groups()
    zone = "Z" if zone in ("z", "Z", "+00:00") else zone
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone == 'Z' else zone}")
        ms = int(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(f"deadline is no real time: {error}") from error
    ms += int(float(fraction or 0) * 1000)
    return f"{day}T{clock}{fraction or ''}{zone}", max(1, ms)


def deadline_from_ms(deadline_ms: int) -> str:
    try:
        moment = datetime.fromtimestamp(deadline_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument("deadline_ms is out of range") from error
    return moment.isoformat(timespec="milliseconds")
