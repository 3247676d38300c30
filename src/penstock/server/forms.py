"""From a decoded body or query to a command: required members, ranges, names, deadlines."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from penstock.api.effects import EffectCommand
from penstock.api.messages import Produce, Settle
from penstock.model.envelope import Envelope, RetryPolicy
from penstock.model.errors import InvalidArgument
from penstock.model.limits import MAX_ENVELOPE_FIELD_BYTES, MAX_LEASE_MS, MAX_OFFSET
from penstock.model.names import clean_name
from penstock.model.units import utf8_bytes
from penstock.server.http.requests import required_index, whole_number
from penstock.server.wire import (
    AckBody,
    EffectBody,
    EnvelopeBody,
    ProduceBody,
    RetryPolicyBody,
)

_RFC3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt](\d{2}:\d{2}:\d{2})(\.\d{1,9})?([Zz]|[+-]\d{2}:\d{2})"
)
_EMPTY = Envelope()


def produce_of(body: ProduceBody) -> Produce:
    topic = clean_name(body.topic, "topic")
    if not body.value:
        raise InvalidArgument("value is required and must be a non-empty string")
    if body.envelope is None:
        return Produce(topic, body.key or "", body.value)
    envelope, deadline_ms = envelope_of(body.envelope)
    return Produce(topic, body.key or "", body.value, envelope, None, deadline_ms)


def envelope_of(body: EnvelopeBody) -> tuple[Envelope | None, int]:
    """The envelope in normal form, None if there is nothing in it, and its deadline in ms."""
    for name in ("run_id", "step_id", "parent_step_id", "tenant_id", "idempotency_key"):
        _check_length(getattr(body, name), f"envelope.{name}")
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


def produce_body_of(params: dict[str, str]) -> ProduceBody:
    """The query form of a produce."""
    return ProduceBody(
        topic=params.get("topic"),
        key=params.get("key"),
        value=params.get("value"),
        envelope=EnvelopeBody(
            run_id=params.get("run_id"),
            step_id=params.get("step_id"),
            parent_step_id=params.get("parent_step_id"),
            tenant_id=params.get("tenant_id") or params.get("tenant"),
            idempotency_key=params.get("idempotency_key") or params.get("idem_key"),
            target_topic=params.get("target_topic"),
            partition_override=whole_number(params, "partition_override"),
            deadline=_query_deadline(params),
            retry_policy=RetryPolicyBody(
                max_attempts=whole_number(params, "retry_max_attempts"),
                backoff_ms=whole_number(params, "retry_backoff_ms"),
                max_backoff_ms=whole_number(params, "retry_max_backoff_ms"),
            ),
        ),
    )


def settle_of(body: AckBody) -> Settle:
    return Settle(
        clean_name(body.topic, "topic"),
        clean_name(body.group, "group"),
        required_index(body.partition, "partition"),
        required_index(body.offset, "offset"),
        clean_name(body.owner, "owner"),
        body.delivery_id or "",
    )


def ack_body_of(params: dict[str, str]) -> dict[str, str | int | None]:
    """The query form of what ack, nack and extend share."""
    return {
        "topic": params.get("topic"),
        "group": params.get("group"),
        "partition": whole_number(params, "partition"),
        "offset": whole_number(params, "offset"),
        "owner": params.get("owner"),
        "delivery_id": params.get("delivery_id"),
    }


def effect_of(body: EffectBody) -> EffectCommand:
    _check_length(body.tenant_id, "tenant_id")
    _check_length(body.key, "key")
    if not body.key:
        raise InvalidArgument("key is required")
    return EffectCommand(
        body.tenant_id or "",
        clean_name(body.topic, "topic"),
        clean_name(body.group, "group"),
        body.key,
        clean_name(body.owner, "owner"),
    )


def lease_of(lease_ms: int | None, default_ms: int) -> int:
    if lease_ms is None:
        return default_ms
    if not 0 <= lease_ms <= MAX_LEASE_MS:
        raise InvalidArgument(f"lease_ms must be between 0 and {MAX_LEASE_MS}")
    return lease_ms or default_ms


def target_of(raw: str | None) -> str:
    return clean_name(raw, "envelope.target_topic") if raw and raw.strip() else ""


def _override(raw: int | None) -> int | None:
    if raw is not None and not -MAX_OFFSET <= raw <= MAX_OFFSET:
        raise InvalidArgument("partition_override is out of range")
    return raw


def policy_of(body: RetryPolicyBody | None) -> RetryPolicy | None:
    """The policy; None when it neither ends the attempts nor makes them wait."""
    if body is None:
        return None
    policy = RetryPolicy(body.max_attempts or 0, body.backoff_ms or 0, body.max_backoff_ms or 0)
    for name in ("max_attempts", "backoff_ms", "max_backoff_ms"):
        if not 0 <= getattr(policy, name) <= MAX_OFFSET:
            raise InvalidArgument(f"retry_policy.{name} must be a whole number, 0 or more")
    return policy if policy.max_attempts or policy.backoff_ms else None


def _query_deadline(params: dict[str, str]) -> str | None:
    for name in ("deadline", "deadline_rfc3339"):
        if params.get(name):
            # An unescaped '+' of a zone arrives as a space.
            return re.sub(r" (\d{2}:\d{2})$", r"+\1", params[name])
    deadline_ms = whole_number(params, "deadline_ms")
    if deadline_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(deadline_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument("deadline_ms is out of range") from error
    return moment.isoformat(timespec="milliseconds")


def deadline_of(raw: str | None) -> tuple[str, int]:
    """The deadline as it comes back to readers, and in ms; ("", 0) without one."""
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


def _check_length(text: str | None, what: str) -> None:
    if text and utf8_bytes(text) > MAX_ENVELOPE_FIELD_BYTES:
        raise InvalidArgument(f"{what} is longer than {MAX_ENVELOPE_FIELD_BYTES} bytes")
