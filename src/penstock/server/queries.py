"""Reads a request's members from its body or, if it has none, from its query."""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from penstock.server.http.requests import Request, decode_body, truth_if_given, whole_number
from penstock.server.schemas import plain_members

Body = TypeVar("Body", bound=msgspec.Struct)


class BodyOrQuery(Generic[Body]):
    """Reads requests of one shape."""

    def __init__(self, shape: type[Body]) -> None:
        self._shape = shape
        self._decoder = msgspec.json.Decoder(shape)

    def read(self, request: Request) -> Body:
        if request.body:
            return decode_body(self._decoder, request.body)
        return body_of_query(request.params(), self._shape)


def body_of_query(params: dict[str, str], shape: type[Body], **others: Any) -> Body:
    """The struct with the members that the query has, each read by its type. `others` are members
    that are read in another way."""
    for name, read in _readers(shape):
        if name not in others:
            others[name] = read(params, name)
    return shape(**others)


@cache
def _readers(shape: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    by_type = {"string": dict.get, "integer": whole_number, "boolean": truth_if_given}
    return [(name, by_type[member["type"]]) for name, member in plain_members(shape).items()]
