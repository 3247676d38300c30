"""Decodes messages and bodies of streams and caches, and says what is wrong with one.

Invariant: of a list or an array no more items are decoded than are allowed. Must not know
connections, nor what a message does.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MAX_REQUEST_ID_CHARS
from penstock.server.batches import SMALL_BODY_BYTES, ArrayDecoder
from penstock.server.websocket.messages import (
    Body,
    CacheGetManyMessage,
    CacheTxnMessage,
    Message,
    PublishBatchMessage,
    PublishMessage,
    RefusedMessage,
    RequestId,
)

AnyBody = TypeVar("AnyBody", bound=Body)


class _Head(msgspec.Struct, gc=False):
    """The part of a wrong message that can be read."""

    request_id: Any = None


_one: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_head = msgspec.json.Decoder(_Head)
_raw_array = ArrayDecoder(msgspec.Raw)


class ListDecoder:
    """Decodes lists of one shape. A large list is counted before its items are decoded."""

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


def decode_one(data: bytes | msgspec.Raw) -> Message | RefusedMessage:
    try:
        message = _one.decode(data)
        if message.request_id is not None:
            check_request_id(message.request_id)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return _refused(data, InvalidArgument(explain(error)))
    except InvalidArgument as error:
        return _refused(data, error)
    return message


def decode_many(data: bytes) -> list[Message | RefusedMessage]:
    """Returns a message or its error for each place; raises if the data is not an array."""
    try:
        messages: list[Message | RefusedMessage] = _messages.decode(data, "operations")
        for message in messages:
            if message.request_id is not None:
                check_request_id(message.request_id)
    except InvalidArgument:
        # Some message is wrong: find out which, and keep the others.
        messages = [decode_one(raw) for raw in _raws.decode(data, "operations")]
    if not messages:
        raise InvalidArgument("the array of operations is empty")
    _check_total(messages)
    return messages


def _check_total(messages: list[Message | RefusedMessage]) -> None:
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


def _items(message: Message | RefusedMessage) -> int:
    """Returns how many items a message counts for: an array is decided in one turn, as a batch
    is."""
    count = 0
    for name in _LISTS.get(type(message), ()):
        raw: msgspec.Raw = getattr(message, name)
        try:
            count += len(_raws.decode(raw, name)) if raw else 0
        except InvalidArgument:
            # The message is refused when it is performed.
            continue
    return count or 1


def is_array(data: bytes) -> bool:
    return data[:1] == b"[" or (data[:1].isspace() and data.lstrip()[:1] == b"[")


def decode_body(decoder: msgspec.json.Decoder[AnyBody], data: bytes) -> AnyBody:
    """Decodes the body of a route; an empty one has no members."""
    try:
        body = decoder.decode(data or b"{}")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidArgument(explain(error)) from error
    if body.request_id is not None:
        check_request_id(body.request_id)
    return body


def query_request_id(params: dict[str, str]) -> str | None:
    """Returns the `request_id` of a request whose body is bare bytes: a text, in the query."""
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
"""The longest explanation, which may quote what was sent."""


def explain(error: Exception, within: str = "") -> str:
    """Says what is wrong with the JSON, and in which member."""
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
    """Returns the `request_id` of a message that may be wrong, if it has one."""
    try:
        request_id = _head.decode(data).request_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    # JSON's true is an int to Python.
    if type(request_id) not in (str, int) or not _is_request_id(request_id):
        return None
    found: str | int = request_id
    return found


def _refused(data: bytes | msgspec.Raw, error: PenstockError) -> RefusedMessage:
    return RefusedMessage(error, request_id_of(data))
