"""Every operation of the API as a call: what to send, and how to read the answer. No IO.

Each operation is written once, here; the sync and the async client bind the same functions.
Invariant: an answer that is no success raises the error of `penstock.model.errors` which the
broker raised, by its code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from penstock.client.deliveries import DEFAULT_LEASE_MS, DeliveryRef
from penstock.client.results import Begun, CreatedTopic, Health, Produced, Topic, Version
from penstock.model.envelope import Envelope
from penstock.model.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MethodNotAllowed,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unauthenticated,
    Unavailable,
)

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])

_BY_STATUS: dict[int, type[PenstockError]] = {
    error.http_status: error
    for error in (
        InvalidArgument,
        TooLarge,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        FailedPrecondition,
        Internal,
        Unavailable,
    )
}
_BY_CODE = {error.code: error for status, error in _BY_STATUS.items() if status != 413}
_PROXY_STATUS = frozenset({502, 503, 504})

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the type of its answer."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes = b""

    def answer(self, status: int, body: bytes) -> T:
        if not 200 <= status < 300:
            raise error_of(status, body)
        try:
            return self.read(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise Internal(
                f"{self.method} {self.path} was answered with something unexpected "
                f"({error}); is this a Penstock broker?"
            ) from error


def named_like(method: M, build: Callable[..., object]) -> M:
    """The method of a client, with the name, the text and the parameters of its call."""
    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    signature = signature.replace(
        parameters=[own, *signature.parameters.values()], return_annotation=answer
    )
    method.__name__, method.__doc__ = build.__name__, build.__doc__
    setattr(method, "__signature__", signature)  # noqa: B010 - no attribute a type checker knows
    return method


class NewMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message to be produced."""

    topic: str
    value: str
    key: str = ""
    envelope: Envelope | None = None


class EffectRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which effect of a group is meant, and who wants to run it."""

    topic: str
    group: str
    key: str
    owner: str
    tenant_id: str = ""


# -- topics and groups ---------------------------------------------------------------------------


def create_topic(name: str, partitions: int = 1) -> Call[CreatedTopic]:
    """Creates a topic; one that exists with as many partitions is left as it is."""
    body = {"name": name, "partitions": partitions}
    return Call("POST", "/v1/topics", _reader(CreatedTopic), _encode(body))


def list_topics() -> Call[list[str]]:
    """The names of all topics, sorted."""
    read = _reader(_Topics)
    return Call("GET", "/v1/topics", lambda body: read(body).topics)


def describe_topic(name: str) -> Call[Topic]:
    """A topic's partitions, its groups and how far they are."""
    return Call("GET", _topic_path(name), _reader(Topic))


def configure_topic(
    name: str, *, retention_ms: int | None = None, retention_bytes: int | None = None
) -> Call[None]:
    """Sets a topic's retention; None leaves a value as it is, 0 means no limit."""
    body = {"retention_ms": retention_ms, "retention_bytes": retention_bytes}
    return Call("PATCH", _topic_path(name), _nothing, _encode(body))


def delete_topic(name: str) -> Call[None]:
    """Deletes a topic with its messages and groups; open streams of it end."""
    return Call("DELETE", _topic_path(name), _nothing)


def delete_group(topic: str, group: str) -> Call[None]:
    """Deletes a group's progress; consuming again starts at the oldest retained message."""
    return Call("DELETE", f"{_topic_path(topic)}/groups/{_segment(group)}", _nothing)


# -- messages ------------------------------------------------------------------------------------


def produce(
    topic: str, value: str, *, key: str = "", envelope: Envelope | None = None
) -> Call[Produced]:
    """Stores one message; when this returns, it is as durable as the broker promises."""
    body = _encode(NewMessage(topic, value, key, envelope))
    return Call("POST", "/v1/produce", _reader(Produced), body)


def produce_batch(messages: Iterable[NewMessage]) -> Call[list[Produced | PenstockError]]:
    """Stores messages in one commit. Each stands or falls alone: the outcomes, in order, are
    results or errors, and nothing is raised for a single message."""
    body = _encode(list(messages))
    return Call("POST", "/v1/produce/batch", lambda data: _outcomes(data, Produced), body)


def ack(delivery: DeliveryRef) -> Call[None]:
    """The message is done for the group."""
    return Call("POST", "/v1/ack", _nothing, _encode(_ref(delivery)))


def ack_batch(deliveries: Iterable[DeliveryRef]) -> Call[list[PenstockError | None]]:
    """Acks in one commit; the outcomes, in order, are None or the error of that ack."""
    body = _encode([_ref(delivery) for delivery in deliveries])
    return Call("POST", "/v1/ack/batch", _acked, body)


def nack(delivery: DeliveryRef, reason: str = "") -> Call[None]:
    """The attempt failed: the message is delivered again as its retry policy says."""
    return Call("POST", "/v1/nack", _nothing, _encode(_ref(delivery) | {"reason": reason}))


def extend(delivery: DeliveryRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[None]:
    """The lease ends `lease_ms` from now."""
    return Call("POST", "/v1/extend", _nothing, _encode(_ref(delivery) | {"lease_ms": lease_ms}))


def consume_path(
    topic: str, group: str, owner: str, lease_ms: int, prefetch: int, heartbeat_ms: int
) -> str:
    """Where a consume stream is found. `prefetch` 0: as many in flight as the broker allows."""
    numbers = {"lease_ms": lease_ms, "prefetch": prefetch, "heartbeat_ms": heartbeat_ms}
    query = urlencode({"topic": topic, "group": group, "owner": owner} | numbers)
    return f"/v1/consume?{query}"


# -- effects: idempotency on the consumer's side -------------------------------------------------


def begin_effect(effect: EffectRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[Begun]:
    """Whether to run the effect. FailedPrecondition while another owner runs it."""
    return _effect("begin", effect, _reader(Begun), lease_ms=lease_ms)


def renew_effect(effect: EffectRef, lease_ms: int = DEFAULT_LEASE_MS) -> Call[None]:
    """The effect takes longer: nobody else may begin it for `lease_ms` from now."""
    return _effect("renew", effect, _nothing, lease_ms=lease_ms)


def commit_effect(effect: EffectRef, result: str = "") -> Call[None]:
    """The effect was run, with this result; it is never run again for this group."""
    return _effect("commit", effect, _nothing, result=result)


def fail_effect(effect: EffectRef, reason: str = "") -> Call[None]:
    """The effect failed; it may be begun again at once, by anybody."""
    return _effect("fail", effect, _nothing, reason=reason)


# -- the broker itself ---------------------------------------------------------------------------


def version() -> Call[Version]:
    """Which broker this is, and what its durability means."""
    return Call("GET", "/v1/version", _reader(Version))


def health() -> Call[Health]:
    """The broker is alive."""
    return Call("GET", "/v1/healthz", _reader(Health))


def ready() -> Call[Health]:
    """The broker takes work; Unavailable says why it does not."""
    return Call("GET", "/v1/readyz", _reader(Health))


# -- answers -------------------------------------------------------------------------------------


class _Topics(msgspec.Struct):
    topics: list[str]


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _Failure(msgspec.Struct):
    """The common error body; as one item of a batch it says its status too."""

    error: str = ""
    message: str = ""
    limit: str = ""
    retry_after_ms: int = 1000
    code: int = 0


_read_failure = msgspec.json.Decoder(_Failure).decode


def error_of(status: int, body: bytes) -> PenstockError:
    """The error that an answer means; by its code, else by its status."""
    try:
        failure = _read_failure(body)
    except (msgspec.DecodeError, ValueError):
        failure = _Failure()
    if failure.error:
        return _error(status, failure)
    text = f"the answer was HTTP {status} without the body of a Penstock error"
    if status in _PROXY_STATUS:
        return Unavailable(f"{text}: a proxy in between, or the broker is not up")
    return Internal(f"{text}; is this a Penstock broker?")


def _error(status: int, failure: _Failure) -> PenstockError:
    message = failure.message or failure.error
    if failure.error == ResourceExhausted.code:
        return ResourceExhausted(
            message, limit=failure.limit, retry_after_ms=failure.retry_after_ms
        )
    if failure.error == MethodNotAllowed.code:
        error = MethodNotAllowed("")
        error.message, error.args = message, (message,)
        return error
    if status == TooLarge.http_status:
        return TooLarge(message)
    kind = _BY_CODE.get(failure.error) or _BY_STATUS.get(status)
    if kind is None:
        return Internal(f"{failure.error}: {message}")
    return kind(message)


def _outcomes(data: bytes, kind: type[T]) -> list[T | PenstockError]:
    outcomes: list[T | PenstockError] = []
    for raw in msgspec.json.decode(data, type=_Results).results:
        failure = _read_failure(raw)
        if failure.error:
            outcomes.append(_error(failure.code, failure))
        else:
            outcomes.append(msgspec.json.decode(raw, type=kind))
    return outcomes


def _acked(data: bytes) -> list[PenstockError | None]:
    outcomes = _outcomes(data, _Failure)
    return [outcome if isinstance(outcome, PenstockError) else None for outcome in outcomes]


@functools.cache
def _reader(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.json.Decoder(kind).decode


def _nothing(_: bytes) -> None:
    """For a 204."""


# -- requests ------------------------------------------------------------------------------------


def _topic_path(name: str) -> str:
    return f"/v1/topics/{_segment(name)}"


def _segment(name: str) -> str:
    if not name.strip():
        raise InvalidArgument("a name is required")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error


def _ref(delivery: DeliveryRef) -> dict[str, Any]:
    """Of a delivery only what names it."""
    return {name: getattr(delivery, name) for name in DeliveryRef.__struct_fields__}


def _effect(step: str, effect: EffectRef, read: Callable[[bytes], T], **more: str | int) -> Call[T]:
    body = _encode(msgspec.structs.asdict(effect) | more)
    return Call("POST", f"/v1/idempotency/{step}", read, body)


def _encode(body: Any) -> bytes:
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"not valid Unicode: {error.reason}") from error
