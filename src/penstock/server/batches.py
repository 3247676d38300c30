"""A batch: its body, a JSON array or NDJSON, and the array of its results.

Each item stands or falls alone: a wrong one has an error as its result, in its place. Invariant: no
more items are decoded than a batch may have, however many a body holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_BATCH_ITEMS, MIB
from penstock.server.http.requests import decode_body, wrong_json
from penstock.server.http.responses import batch_error, encode_json

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

Body = TypeVar("Body")
Command = TypeVar("Command")
Outcome = TypeVar("Outcome")

SMALL_BODY_BYTES = MIB
"""A body of this size holds so few items that decoding all of them takes no noticeable time."""

_any = msgspec.json.Decoder(msgspec.Raw)
"""Checks that something is JSON without building objects."""


class BatchError(msgspec.Struct):
    """The common error body with its HTTP status as `code`."""

    error: str
    message: str
    code: int


class BatchDecoder(Generic[Body]):
    """Decodes batches whose items have one shape."""

    def __init__(self, shape: type[Body]) -> None:
        self._one = msgspec.json.Decoder(shape)
        self._array = ArrayDecoder(shape)
        self._raw_array = ArrayDecoder(msgspec.Raw)

    def decode(self, body: bytes) -> list[Body | PenstockError]:
        """Returns an item or its error for each place; raises if the whole body is malformed."""
        is_array = body.lstrip()[:1] == b"["
        if not is_array and _has_too_many_lines(body):
            raise _too_many()
        try:
            items: list[Any] = self._array.decode(body) if is_array else self._decode_lines(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            # Some item is wrong: find out which, and keep the others.
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
                raise wrong_json(error) from error
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
    """Decodes an array, and stops at the first item too many. msgspec decodes a list to its end, so
    a large body is decoded as a struct with as many members as a batch may have."""

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


def read_commands(
    items: list[Body | PenstockError], command_of: Callable[[Body], Command]
) -> tuple[list[Command], dict[int, PenstockError]]:
    """Returns the commands, and the error of each place that has none."""
    commands: list[Command] = []
    refused: dict[int, PenstockError] = {}
    for place, item in enumerate(items):
        try:
            if isinstance(item, PenstockError):
                raise item
            commands.append(command_of(item))
        except PenstockError as error:
            refused[place] = error
    return commands, refused


def send_results(
    reply: Reply,
    refused: dict[int, PenstockError],
    results_of: Callable[[list[Outcome]], Iterator[Any]],
    outcomes: list[Outcome] | PenstockError,
) -> None:
    """Sends the results of a batch, with the errors of `read_commands` in their places."""
    if isinstance(outcomes, PenstockError):
        reply.send_error(outcomes)
        return
    results = list(results_of(outcomes))
    if refused:
        decided = iter(results)
        results = [
            batch_error(refused[place]) if place in refused else next(decided)
            for place in range(len(results) + len(refused))
        ]
    reply.send(200, encode_json({"results": results}))


def _check_json(line: bytes) -> None:
    decode_body(_any, line)
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise wrong_json(error) from error


def _too_many() -> InvalidArgument:
    return InvalidArgument(f"a batch has at most {MAX_BATCH_ITEMS} items")


def _has_too_many_lines(body: bytes) -> bool:
    """Counts newlines first; lines are split, to leave out blank ones, only if those are many."""
    newlines = body.count(b"\n")
    if newlines > 10 * MAX_BATCH_ITEMS:
        return True
    return newlines >= MAX_BATCH_ITEMS and len(_lines(body)) > MAX_BATCH_ITEMS


def _lines(body: bytes) -> list[bytes]:
    return [line for line in body.split(b"\n") if line.strip()]
