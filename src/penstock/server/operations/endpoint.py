"""What is said of one route: its request, its answers, its errors.

Must not know which routes there are, nor how a document or a page looks.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """`shape` None: there is no body, or bytes as they are. Of a batch, it is the shape of one
    result. `headers` are those that only this answer has: what each says, and its type."""

    text: str
    shape: Any = None
    example: Any = None
    media_type: str = "application/json"
    headers: dict[str, tuple[str, str]] = {}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`query` None: whatever the body may have. `example` is that of the body or, without one, of
    the query; `names` are those in its path that are other than usual. `or_array`: the body may be
    an array of such bodies too, which is answered by an array. `conditions` are headers that take
    ETags, with what each means."""

    method: str
    path: str
    tag: str
    summary: str
    text: str = ""
    body: Any = None
    required: tuple[str, ...] = ()
    query: tuple[str, ...] | None = None
    query_only: bool = False
    batch: bool = False
    or_array: bool = False
    example: Any = None
    names: dict[str, str] = {}
    conditions: dict[str, str] = {}
    answers: dict[int, Answer]
    errors: tuple[int, ...] = ()


DONE = {204: Answer("Done.")}
