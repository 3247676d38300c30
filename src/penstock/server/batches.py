"""The body of a batch: a JSON array or NDJSON, decoded item by item if some item is wrong.

Invariant: no more items are ever decoded than a batch may have, however many a body holds.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MIB
from penstock.server.http.requests import decode_body

Body = TypeVar("Body")

SMALL_BODY_BYTES = MIB
"""A body so small cannot hold so many items that decoding them all would be felt."""

_any = msgspec.json.Decoder(msgspec.Raw)
"""Looks whether something is JSON, and builds nothing of it."""


class BatchDecoder(Generic[Body]):
    """For items of one shape."""

    def __init__(self, shape: type[Body]) -> None:
        self._one = msgspec.json.Decoder(shape)
        self._array = ArrayDecoder(shape)
        self._raw_array = ArrayDecoder(msgspec.Raw)

    def decode(self, body: bytes) -> list[Body | PenstockError]:
        """An item, or what is wrong with it, per place; a malformed body is an error itself."""
        is_array = body.lstrip()[:1] == b"["
        if not is_array and _has_too_many_lines(body):
            raise _too_many()
        try:
            items: list[Any] = self._array.decode(body) if is_array else self._decode_lines(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            # Some item is not as it should be: find out which, and let the others stand.
            items = self._decode_each(body, is_array=is_array)
        if not items:
            raise InvalidArgument("the batch is empty; send a JSON array or NDJSON lines")
        return items

    def _decode_lines(self, body: bytes) -> list[Body]:
        items = self._one.decode_lines(body)
        if len(items) != len(_lines(body)):
            raise InvalidArgument("NDJSON has one object a line")
        return items

    def _decode_each(self, body: bytes, *, is_array: bool) -> list[Any]:
        if is_array:
            try:
                lines = [bytes(raw) for raw in self._raw_array.decode(body)]
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise InvalidArgument(f"invalid JSON body: {error}") from error
        else:
            lines = _lines(body)
            for line in lines:
                _check_json(line)
        return [self._decode_one(line) for line in lines]

    def _decode_one(self, line: bytes) -> Body | InvalidArgument:
        try:
            return decode_body(self._one, line)
        except InvalidArgument as error:
            return error


class ArrayDecoder:
    """Decodes an array and stops at the item that is one too many: a plain list would be decoded
    to its end first, so a large body is read as a record of as many members as are allowed."""

    def __init__(self, shape: Any) -> None:
        members = [(f"item_{n}", shape | UnsetType, UNSET) for n in range(MAX_BATCH_ITEMS)]
        bounded = msgspec.defstruct("Batch", members, array_like=True, forbid_unknown_fields=True)
        self._list = msgspec.json.Decoder(list[shape])
        self._bounded = msgspec.json.Decoder(bounded)

    def decode(self, body: bytes) -> list[Any]:
        if len(body) > SMALL_BODY_BYTES:
            try:
                batch = self._bounded.decode(body)
            except msgspec.ValidationError as error:
                if "at most length" in str(error):
                    raise _too_many() from error
                raise
            return [item for item in msgspec.structs.astuple(batch) if item is not UNSET]
        items = self._list.decode(body)
        if len(items) > MAX_BATCH_ITEMS:
            raise _too_many()
        return items


def _check_json(line: bytes) -> None:
    decode_body(_any, line)
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"invalid JSON body: {error}") from error


def _too_many() -> InvalidArgument:
    return InvalidArgument(f"a batch has at most {MAX_BATCH_ITEMS} items")


def _has_too_many_lines(body: bytes) -> bool:
    """Blank lines do not count, so a first count is not the last word."""
    newlines = body.count(b"\n")
    if newlines > 10 * MAX_BATCH_ITEMS:
        return True
    return newlines >= MAX_BATCH_ITEMS and len(_lines(body)) > MAX_BATCH_ITEMS


def _lines(body: bytes) -> list[bytes]:
    return [line for line in body.split(b"\n") if line.strip()]
