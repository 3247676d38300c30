"""The messages of streams and caches: what a client may say, decoded strictly.

A message is a JSON object told apart by its `type`; an unknown member is refused, `null` means
absent. A body is a message without the names that a route has in its path. Lists stay undecoded
until they are used, when no more of them is decoded than is allowed. Must not know connections,
nor what a message does.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_REQUEST_ID_CHARS
from penstock.server.batches import SMALL_BODY_BYTES, ArrayDecoder

AnyBody = TypeVar("AnyBody", bound="Body")

RequestId = str | int | None

ABSENT = msgspec.Raw()
"""A list that was not sent."""


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """`request_id` is echoed in every answer."""

    request_id: RequestId = None


class PublishBody(Body):
    """`payload` is base64; `invalidate` are texts `cache:<cache>:<key>`."""

    payload: bytes | None = None
    ack: Literal["none", "per_message"] | None = None
    invalidate: msgspec.Raw = ABSENT


class PublishBatchBody(Body):
    payloads: msgspec.Raw = ABSENT
    ack: Literal["none", "per_message", "per_batch"] | None = None
    invalidate: msgspec.Raw = ABSENT


class PutBody(Body):
    value: bytes | None = None
    ttl_ms: int | None = None
    if_not_exists: bool | None = None
    if_version: int | None = None


class GetManyBody(Body):
    keys: msgspec.Raw = ABSENT


class IncrBody(Body):
    delta: int | None = None
    ttl_ms: int | None = None


class TxnBody(Body):
    checks: msgspec.Raw = ABSENT
    ops: msgspec.Raw = ABSENT


class PublishMessage(PublishBody, tag_field="type", tag="publish"):
    tenant_id: str | None = None
    namespace: str | None = None
    stream: str | None = None


class PublishBatchMessage(PublishBatchBody, tag_field="type", tag="publish_batch"):
    tenant_id: str | None = None
    namespace: str | None = None
    stream: str | None = None


class SubscribeMessage(Body, tag_field="type", tag="subscribe"):
    tenant_id: str | None = None
    namespace: str | None = None
    stream: str | None = None
    lag: bool | None = None
    event_queue_depth: int | None = None
    batch: bool | None = None


class UnsubscribeMessage(Body, tag_field="type", tag="unsubscribe"):
    subscription_id: str | None = None


class LagMessage(Body, tag_field="type", tag="lag"):
    subscription_id: str | None = None


class CachePutMessage(PutBody, tag_field="type", tag="cache_put"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None
    key: str | None = None


class CacheGetMessage(Body, tag_field="type", tag="cache_get"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None
    key: str | None = None


class CacheGetManyMessage(GetManyBody, tag_field="type", tag="cache_get_many"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None


class CacheDeleteMessage(Body, tag_field="type", tag="cache_delete"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None
    key: str | None = None
    if_version: int | None = None


class CacheIncrMessage(IncrBody, tag_field="type", tag="cache_incr"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None
    key: str | None = None


class CacheTxnMessage(TxnBody, tag_field="type", tag="cache_txn"):
    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None


class CacheWatchMessage(Body, tag_field="type", tag="cache_watch"):
    """Of one `key`, or of all that begin with `prefix`."""

    tenant_id: str | None = None
    namespace: str | None = None
    cache: str | None = None
    key: str | None = None
    prefix: str | None = None
    include: msgspec.Raw = ABSENT
    since_version: int | None = None


class CacheUnwatchMessage(Body, tag_field="type", tag="cache_unwatch"):
    watch_id: str | None = None


class PingMessage(Body, tag_field="type", tag="ping"):
    pass


class TxnCheck(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """`cache` None: the transaction's own."""

    cache: str | None = None
    key: str | None = None
    version: int | None = None
    exists: bool | None = None


class TxnPut(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="put"):
    cache: str | None = None
    key: str | None = None
    value: bytes | None = None
    ttl_ms: int | None = None


class TxnDelete(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="delete"):
    cache: str | None = None
    key: str | None = None


class TxnIncr(msgspec.Struct, forbid_unknown_fields=True, gc=False, tag_field="op", tag="incr"):
    cache: str | None = None
    key: str | None = None
    delta: int | None = None
    ttl_ms: int | None = None


class Refused(msgspec.Struct):
    """In the place of a message that is none: what is wrong, and what could be read of it."""

    error: PenstockError
    request_id: RequestId = None


Message = (
    PublishMessage
    | PublishBatchMessage
    | SubscribeMessage
    | UnsubscribeMessage
    | LagMessage
    | CachePutMessage
    | CacheGetMessage
    | CacheGetManyMessage
    | CacheDeleteMessage
    | CacheIncrMessage
    | CacheTxnMessage
    | CacheWatchMessage
    | CacheUnwatchMessage
    | PingMessage
)


# -- decoding --------------------------------------------------------------------------------------


class _Head(msgspec.Struct, gc=False):
    """What can be read of a message that is not as it should be."""

    request_id: Any = None


_one: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_head = msgspec.json.Decoder(_Head)
_raw_array = ArrayDecoder(msgspec.Raw)


class ListDecoder:
    """For lists of one shape, of which a large one is counted before anything is made of it."""

    def __init__(self, shape: Any) -> None:
        self._list: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[shape])

    def decode(self, data: bytes | msgspec.Raw, what: str) -> list[Any]:
        try:
            if len(data) > SMALL_BODY_BYTES:
                _raw_array.decode(data)
            found = self._list.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise InvalidArgument(explain(error, what)) from error
        if len(found) > MAX_BATCH_ITEMS:
            raise InvalidArgument(f"{what} has more than {MAX_BATCH_ITEMS} items")
        return found


_messages = ListDecoder(Message)
_raws = ListDecoder(msgspec.Raw)


def decode_one(data: bytes | msgspec.Raw) -> Message | Refused:
    try:
        message = _one.decode(data)
        if message.request_id is not None:
            check_request_id(message.request_id)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return _refused(data, InvalidArgument(explain(error)))
    except InvalidArgument as error:
        return _refused(data, error)
    return message


def decode_many(data: bytes) -> list[Message | Refused]:
    """A message, or what is wrong with it, per place; raises when it is no array at all."""
    try:
        messages: list[Message | Refused] = _messages.decode(data, "operations")
        for message in messages:
            if message.request_id is not None:
                check_request_id(message.request_id)
    except InvalidArgument:
        # Some of them is not as it should be: find out which, and let the others stand.
        messages = [decode_one(raw) for raw in _raws.decode(data, "operations")]
    if not messages:
        raise InvalidArgument("the array of operations is empty")
    _check_total(messages)
    return messages


def _check_total(messages: list[Message | Refused]) -> None:
    total = 0
    for message in messages:
        total += _items(message)
        if total > MAX_BATCH_ITEMS:
            raise InvalidArgument(
                f"the operations have more than {MAX_BATCH_ITEMS} keys, payloads and ops "
                "together; send them in several arrays"
            )


_LISTS: dict[type, tuple[str, ...]] = {
    PublishMessage: ("invalidate",),
    PublishBatchMessage: ("payloads", "invalidate"),
    CacheGetManyMessage: ("keys",),
    CacheTxnMessage: ("checks", "ops"),
}


def _items(message: Message | Refused) -> int:
    """What an operation counts for in an array, which is decided in one turn as a batch is."""
    count = 0
    for name in _LISTS.get(type(message), ()):
        raw: msgspec.Raw = getattr(message, name)
        try:
            count += len(_raws.decode(raw, name)) if raw else 0
        except InvalidArgument:
            # It is refused in its place.
            continue
    return count or 1


def is_array(data: bytes) -> bool:
    return data[:1] == b"[" or (data[:1].isspace() and data.lstrip()[:1] == b"[")


def decode_body(decoder: msgspec.json.Decoder[AnyBody], data: bytes) -> AnyBody:
    """The body of a route; where all members are optional, none is needed."""
    try:
        body = decoder.decode(data or b"{}")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidArgument(explain(error)) from error
    if body.request_id is not None:
        check_request_id(body.request_id)
    return body


def query_request_id(params: dict[str, str]) -> str | None:
    """The `request_id` of a request whose body is bare bytes: a text, in the query."""
    request_id = params.get("request_id")
    if request_id is not None:
        check_request_id(request_id)
    return request_id


def check_request_id(request_id: str | int) -> None:
    if not _is_request_id(request_id):
        raise InvalidArgument(
            f"request_id is a text of at most {MAX_REQUEST_ID_CHARS} characters, or an integer "
            "of 64 bits"
        )


def _is_request_id(request_id: str | int) -> bool:
    if isinstance(request_id, str):
        return len(request_id) <= MAX_REQUEST_ID_CHARS
    return -(2**63) <= request_id < 2**63


_PLACE = re.compile(r"(.*) - at `\$\.?(.*?)`", re.DOTALL)
_MAX_TEXT = 300
"""Of an explanation, which may quote what was sent."""


def explain(error: Exception, within: str = "") -> str:
    """What is wrong with the JSON, in terms of its members."""
    return _explanation(error, within)[:_MAX_TEXT]


def _explanation(error: Exception, within: str) -> str:
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"invalid JSON: {text}"
    found = _PLACE.fullmatch(text)
    reason, place = (found[1], found[2]) if found else (text, "")
    member = f"{within}{'.' if within and place[:1] not in ('', '[') else ''}{place}"
    if reason.startswith("Invalid base64"):
        return f"{member} is not base64"
    if reason.startswith("Invalid value") and member.endswith("type"):
        return f"unknown type {reason.removeprefix('Invalid value ')}"
    if named := re.fullmatch(r"Object missing required field `(.*)`", reason, re.DOTALL):
        return f"{member}{'.' if member else ''}{named[1]} is required"
    if named := re.fullmatch(r"Object contains unknown field `(.*)`", reason, re.DOTALL):
        return f"unknown member {named[1]!r}{f' in {member}' if member else ''}"
    return f"{member or 'message'}: {reason[:1].lower()}{reason[1:]}"


def request_id_of(data: bytes | msgspec.Raw) -> RequestId:
    """The `request_id` of something that is otherwise not as it should be, if it has one."""
    try:
        request_id = _head.decode(data).request_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    # JSON's true is an int to Python.
    if type(request_id) not in (str, int) or not _is_request_id(request_id):
        return None
    found: str | int = request_id
    return found


def _refused(data: bytes | msgspec.Raw, error: PenstockError) -> Refused:
    return Refused(error, request_id_of(data))
