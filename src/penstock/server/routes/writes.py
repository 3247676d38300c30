"""Writes by batch over HTTP: stage a piece, commit a batch, drop what is staged, look.

PUT    /v1/writes/{producer}/{batch}/{part}/{piece}
POST   /v1/writes/{producer}/{batch}/commit
DELETE /v1/writes/{producer}/{batch}
GET    /v1/writes/{producer}
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa

from penstock.api.rows import CheckedRows
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import MAX_COMMIT_PARTS, MIB, Limits
from penstock.model.names import clean_name
from penstock.model.tenancy import Path
from penstock.model.writes import (
    CommitBatch,
    CommitReport,
    PartCommit,
    PieceName,
    PieceReport,
    WriterReport,
)
from penstock.server.arrow_bodies import STREAM_MARK, read_table
from penstock.server.commands import path_of
from penstock.server.http.dispatch import Handler, RequestDispatch, send_outcome
from penstock.server.http.requests import (
    Request,
    decode_body,
    path_name,
    required_index,
    whole_number,
)
from penstock.server.line_bodies import cache_table, produce_table
from penstock.server.row_checks import check_cache_rows, check_topic_rows
from penstock.server.wire import CommitBody, PartBody

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

Report = TypeVar("Report", PieceReport, CommitReport, WriterReport)

PREFIX = b"/v1/writes/"
MAX_COMMIT_BYTES = 4 * MIB
"""Of a commit's body: it is decoded on the loop."""

_commit_decoder = msgspec.json.Decoder(CommitBody)


def write_route(path: bytes) -> dict[bytes, Handler] | None:
    if not path.startswith(PREFIX):
        return None
    parts = path[len(PREFIX) :].split(b"/")
    if not all(parts):
        return None
    if len(parts) == 3:
        return _COMMIT if parts[2] == b"commit" else None
    return _BY_LENGTH.get(len(parts))


def stage(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    names = _names(request)
    params = request.params()
    piece = PieceName(
        _producer(names[0]),
        _number(names[1], "batch"),
        _number(names[2], "part"),
        _attempt(params.get("attempt")),
        _number(names[3], "piece"),
    )
    topic, cache = _target(params)
    check = partial(_checked, request.body, topic, cache, hub.engine.limits)
    hub.engine.writes.stage(
        piece,
        topic,
        cache,
        len(request.body),
        check,
        lambda outcome: send_outcome(reply, outcome, 200, _same),
    )


def commit(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    if len(request.body) > MAX_COMMIT_BYTES:
        raise TooLarge(f"a commit has at most {MAX_COMMIT_BYTES} bytes")
    names = _names(request)
    body = decode_body(_commit_decoder, request.body)
    if len(body.parts) > MAX_COMMIT_PARTS:
        raise TooLarge(f"a batch has at most {MAX_COMMIT_PARTS} parts")
    command = CommitBatch(
        _producer(names[0]),
        _number(names[1], "batch"),
        [_part(part) for part in body.parts],
        body.once,
    )
    hub.engine.writes.commit(command, partial(_committed, reply))


def abort(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    names = _names(request)
    hub.engine.writes.abort(_producer(names[0]), _number(names[1], "batch"), reply.settle)


def describe(hub: RequestDispatch, request: Request, reply: Reply) -> None:
    hub.engine.writes.describe(
        _producer(_names(request)[0]), lambda outcome: send_outcome(reply, outcome, 200, _same)
    )


def _committed(reply: Reply, outcome: CommitReport | PenstockError) -> None:
    status = 202 if isinstance(outcome, CommitReport) and outcome.status == "storing" else 200
    send_outcome(reply, outcome, status, _same)


def _checked(
    body: bytes, topic: str, cache: Path | None, limits: Limits, now_ms: int
) -> CheckedRows:
    """On a thread: what the body holds, if it can be written."""
    if cache is not None:
        table = _table(body, cache_table, limits.max_body_bytes)
        return check_cache_rows(table, limits.max_message_bytes)
    table = _table(body, produce_table, limits.max_body_bytes)
    return check_topic_rows(table, topic, limits.max_message_bytes, now_ms)


def _table(body: bytes, of_lines: Callable[[bytes], pa.Table], max_bytes: int) -> pa.Table:
    is_arrow = body.startswith(STREAM_MARK)
    return read_table(body, max_bytes) if is_arrow else of_lines(body)


def _target(params: dict[str, str]) -> tuple[str, Path | None]:
    """The topic of rows that name none, or the cache."""
    topic, cache = params.get("topic", ""), params.get("cache", "")
    if not cache:
        return clean_name(topic, "topic") if topic.strip() else "", None
    if topic:
        raise InvalidArgument("topic and cache are both given; a piece goes to one of them")
    parts = cache.split("/")
    if len(parts) != 3:
        raise InvalidArgument("cache is <tenant>/<namespace>/<cache>")
    return "", path_of(parts[0], parts[1], parts[2], "cache")


def _part(body: PartBody) -> PartCommit:
    return PartCommit(
        required_index(body.part, "part"),
        _attempt(body.attempt),
        required_index(body.pieces, "pieces"),
        required_index(body.rows, "rows"),
    )


def _names(request: Request) -> list[str]:
    return [path_name(part) for part in request.path[len(PREFIX) :].split(b"/")]


def _producer(raw: str) -> str:
    return clean_name(raw, "producer")


def _attempt(raw: str | None) -> str:
    return clean_name(raw, "attempt") if raw and raw.strip() else ""


def _number(text: str, name: str) -> int:
    return required_index(whole_number({name: text}, name), name)


def _same(report: Report) -> Report:
    return report


_COMMIT: dict[bytes, Handler] = {b"POST": commit}
_BY_LENGTH: dict[int, dict[bytes, Handler]] = {
    1: {b"GET": describe},
    2: {b"DELETE": abort},
    4: {b"PUT": stage},
}
