"""The calls on topics, messages and effects. No IO.

Each operation is written once, here; both clients bind the same functions as methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from penstock.client.calls import (
    Call,
    ErrorAnswer,
    encode,
    error_from,
    nothing,
    query_of,
    read_error_answer,
    reader,
    require_text,
    segment,
)
from penstock.client.deliveries import DEFAULT_LEASE_MS, Delivery, DeliveryRef
from penstock.client.results import (
    Begun,
    CreatedTopic,
    EffectStatus,
    Health,
    Produced,
    Topic,
    Version,
)
from penstock.model.envelope import Envelope
from penstock.model.errors import InvalidArgument, PenstockError

T = TypeVar("T")

_ENVELOPE_TEXTS = (
    *("run_id", "step_id", "parent_step_id", "tenant_id", "idempotency_key"),
    *("target_topic", "deadline"),
)


class NewMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message to be produced. Raises TypeError if its value or key is not text."""

    topic: str
    value: str
    key: str = ""
    envelope: Envelope | None = None

    def __post_init__(self) -> None:
        require_text("topic", self.topic)
        require_text("value", self.value)
        require_text("key", self.key)
        if self.envelope is not None:
            if not isinstance(self.envelope, Envelope):
                raise TypeError(f"envelope must be an Envelope, not {type(self.envelope).__name__}")
            for name in _ENVELOPE_TEXTS:
                require_text(name, getattr(self.envelope, name))


class EffectRef(msgspec.Struct, frozen=True, kw_only=True):
    """The name of an effect of a group, and the owner that wants to run it. A look-up needs no
    owner."""

    topic: str
    group: str
    key: str
    owner: str = ""
    tenant_id: str = ""

    def __post_init__(self) -> None:
        require_text("key", self.key)
        require_text("tenant_id", self.tenant_id)


# -- topics and groups ---------------------------------------------------------------------------


def create_topic(
    name: str,
    partitions: int = 1,
    *,
    after_archive: bool | None = None,
    max_attempts: int | None = None,
    retry_backoff_ms: int | None = None,
    retry_max_backoff_ms: int | None = None,
) -> Call[CreatedTopic]:
    """Creates a topic. One that exists with as many partitions is left as it is. With
    `after_archive` retention keeps every message until the group `archive` has finished it. The
    other settings apply to messages without a retry policy; see `configure_topic`."""
    settings = _if_given(
        after_archive=after_archive,
        max_attempts=max_attempts,
        retry_backoff_ms=retry_backoff_ms,
        retry_max_backoff_ms=retry_max_backoff_ms,
    )
    body = {"name": name, "partitions": partitions, **settings}
    return Call("POST", "/v1/topics", reader(CreatedTopic), encode(body))


def list_topics() -> Call[list[str]]:
    """Returns the names of all topics, sorted."""
    read = reader(_Topics)
    return Call("GET", "/v1/topics", lambda body: read(body).topics)


def describe_topic(name: str) -> Call[Topic]:
    """Returns a topic's partitions, its groups and their progress."""
    return Call("GET", topic_path(name), reader(Topic))


def configure_topic(
    name: str,
    *,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
    after_archive: bool | None = None,
    max_attempts: int | None = None,
    retry_backoff_ms: int | None = None,
    retry_max_backoff_ms: int | None = None,
) -> Call[None]:
    """Changes a topic's settings; None leaves a value as it is. A retention of 0 means no limit.
    With `after_archive` retention keeps every message until the group `archive` has finished it.
    Messages without a retry policy are delivered at most `max_attempts` times (0: no limit). Their
    wait after a nack doubles from `retry_backoff_ms` to `retry_max_backoff_ms` (0: the broker's
    setting)."""
    body = _if_given(
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        after_archive=after_archive,
        max_attempts=max_attempts,
        retry_backoff_ms=retry_backoff_ms,
        retry_max_backoff_ms=retry_max_backoff_ms,
    )
    return Call("PATCH", topic_path(name), nothing, encode(body))


def delete_topic(name: str) -> Call[None]:
    """Deletes a topic with its messages and groups, and ends its open streams."""
    return Call("DELETE", topic_path(name), nothing)


def delete_group(topic: str, group: str) -> Call[None]:
    """Deletes a group's progress; consuming again starts at the oldest retained message."""
    return Call("DELETE", f"{topic_path(topic)}/groups/{segment(group)}", nothing)


# -- messages ------------------------------------------------------------------------------------


def produce(
    topic: str, value: str, *, key: str = "", envelope: Envelope | None = None
) -> Call[Produced]:
    """Stores one message. When this returns, the message is as durable as the broker promises. The
    result has its partition and offset."""
    body = encode(NewMessage(topic, value, key, envelope))
    return Call("POST", "/v1/produce", reader(Produced), body, add_headers=_with_place)


def produce_batch(messages: Iterable[NewMessage]) -> Call[list[Produced | PenstockError]]:
    """Stores messages in one commit. Returns a result or an error for each message, in order; the
    error of one message does not affect the others and is not raised."""
    body = encode(list(messages))
    return Call("POST", "/v1/produce/batch", lambda data: _outcomes(data, Produced), body)


def redriven(letter: Delivery) -> NewMessage:
    """Returns the message that repeats a dead letter in its original topic, with its original retry
    policy. Its idempotency key is made from the dead letter's place and time. The broker knows the
    original key already and would store nothing. With this key, a redrive that is repeated because
    its ack was lost stores nothing twice. A deadline that has passed is left out, since the broker
    would refuse it."""
    dlq = letter.envelope.dlq
    if dlq is None:
        raise InvalidArgument(
            f"offset {letter.offset} of topic {letter.topic!r} is no dead letter: it does not say "
            "which topic it is from"
        )
    place = f"{letter.topic}:{letter.partition}:{letter.offset}:{dlq.routed_at_ms}"
    envelope = msgspec.structs.replace(
        letter.envelope,
        dlq=None,
        deadline="" if _has_passed(letter.envelope.deadline) else letter.envelope.deadline,
        retry_policy=dlq.retry_policy,
        idempotency_key=f"redrive:{place}",
    )
    return NewMessage(dlq.original_topic, letter.value, letter.key, envelope)


def _has_passed(deadline: str) -> bool:
    return bool(deadline) and datetime.fromisoformat(deadline) <= datetime.now(UTC)


def ack(delivery: DeliveryRef) -> Call[None]:
    """Finishes a message for its group."""
    return Call("POST", "/v1/ack", nothing, encode(delivery_members(delivery)))


def ack_batch(deliveries: Iterable[DeliveryRef]) -> Call[list[PenstockError | None]]:
    """Acks deliveries in one commit. Returns None or an error for each, in order."""
    body = encode([delivery_members(delivery) for delivery in deliveries])
    return Call("POST", "/v1/ack/batch", _settled, body)


def nack(
    delivery: DeliveryRef, reason: str = "", *, delay_ms: int | None = None, dead: bool = False
) -> Call[None]:
    """Reports a failed attempt. The message is delivered again as its retry policy says, or after
    `delay_ms` (0: at once). With `dead` it goes to the dead letters instead."""
    require_text("reason", reason)
    how = _if_given(delay_ms=delay_ms, dead=dead or None)
    return Call(
        "POST", "/v1/nack", nothing, encode(delivery_members(delivery) | {"reason": reason} | how)
    )


def release(delivery: DeliveryRef) -> Call[None]:
    """Gives a delivery back that nobody began to handle. It is delivered again at once, in its old
    place, and the attempt does not count."""
    return Call("POST", "/v1/release", nothing, encode(delivery_members(delivery)))


def release_batch(deliveries: Iterable[DeliveryRef]) -> Call[list[PenstockError | None]]:
    """Releases deliveries in one commit. Returns None or an error for each, in order."""
    body = encode([delivery_members(delivery) for delivery in deliveries])
    return Call("POST", "/v1/release/batch", _settled, body)


def extend(delivery: DeliveryRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[None]:
    """Extends the lease: it ends `lease_ms` from now."""
    return Call(
        "POST", "/v1/extend", nothing, encode(delivery_members(delivery) | {"lease_ms": lease_ms})
    )


def consume_path(
    topic: str, group: str, owner: str, lease_ms: int, prefetch: int, heartbeat_ms: int
) -> str:
    """Returns the address of a consume stream. `prefetch` 0 means the broker's limit."""
    numbers = {"lease_ms": lease_ms, "prefetch": prefetch, "heartbeat_ms": heartbeat_ms}
    query = urlencode({"topic": topic, "group": group, "owner": owner} | numbers)
    return f"/v1/consume?{query}"


# -- effects: idempotency for consumers ----------------------------------------------------------


def begin_effect(effect: EffectRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[Begun]:
    """Begins an effect. The result says whether to run it. Raises FailedPrecondition while another
    owner runs it."""
    return _effect("begin", effect, reader(Begun), lease_ms=lease_ms)


def look_up_effect(effect: EffectRef) -> Call[EffectStatus]:
    """Returns an effect's status, owner, remaining lease, result and last error; any owner may ask.
    Raises NotFound if it was never begun or is forgotten."""
    query = query_of(
        tenant_id=effect.tenant_id or None,
        topic=effect.topic,
        group=effect.group,
        key=effect.key,
    )
    return Call("GET", f"/v1/idempotency?{query}", reader(EffectStatus))


def renew_effect(effect: EffectRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[None]:
    """Extends the lease on an effect: no other owner may begin it for `lease_ms` from now."""
    return _effect("renew", effect, nothing, lease_ms=lease_ms)


def commit_effect(effect: EffectRef, result: str = "") -> Call[None]:
    """Records that an effect was run, with its result. It is never run again for this group."""
    require_text("result", result)
    return _effect("commit", effect, nothing, result=result)


def fail_effect(effect: EffectRef, reason: str = "") -> Call[None]:
    """Records that an effect failed. Any owner may begin it again at once."""
    require_text("reason", reason)
    return _effect("fail", effect, nothing, reason=reason)


# -- the broker itself ---------------------------------------------------------------------------


def version() -> Call[Version]:
    """Returns the broker's version and what its durability means."""
    return Call("GET", "/v1/version", reader(Version))


def health() -> Call[Health]:
    """Returns whether the broker is alive."""
    return Call("GET", "/v1/healthz", reader(Health))


def ready() -> Call[Health]:
    """Returns whether the broker takes work. Raises Unavailable with the reason if it does not."""
    return Call("GET", "/v1/readyz", reader(Health))


# -- answers -------------------------------------------------------------------------------------


class _Topics(msgspec.Struct):
    topics: list[str]


class _BatchResults(msgspec.Struct):
    results: list[msgspec.Raw]


def _with_place(produced: Produced, headers: Mapping[str, str]) -> Produced:
    """Adds the partition and offset from the headers. An older broker does not send them."""
    if headers.get("penstock-duplicate") == "true":
        return Produced(produced.topic, duplicate=True)
    partition, offset = headers.get("penstock-partition"), headers.get("penstock-offset")
    if partition is None or offset is None:
        return produced
    return Produced(produced.topic, int(partition), int(offset))


def _outcomes(data: bytes, kind: type[T]) -> list[T | PenstockError]:
    outcomes: list[T | PenstockError] = []
    for raw in msgspec.json.decode(data, type=_BatchResults).results:
        failure = read_error_answer(raw)
        if failure.error:
            outcomes.append(error_from(failure.code, failure))
        else:
            outcomes.append(msgspec.json.decode(raw, type=kind))
    return outcomes


def _settled(data: bytes) -> list[PenstockError | None]:
    outcomes = _outcomes(data, ErrorAnswer)
    return [outcome if isinstance(outcome, PenstockError) else None for outcome in outcomes]


# -- requests ------------------------------------------------------------------------------------


def topic_path(name: str) -> str:
    return f"/v1/topics/{segment(name)}"


def _if_given(**members: int | None) -> dict[str, int]:
    """Returns the members that are not None. A broker refuses members that it does not know."""
    return {name: value for name, value in members.items() if value is not None}


def delivery_members(delivery: DeliveryRef) -> dict[str, Any]:
    """Returns the members that name a delivery."""
    return {name: getattr(delivery, name) for name in DeliveryRef.__struct_fields__}


def _effect(step: str, effect: EffectRef, read: Callable[[bytes], T], **more: str | int) -> Call[T]:
    body = encode(msgspec.structs.asdict(effect) | more)
    return Call("POST", f"/v1/idempotency/{step}", read, body)
