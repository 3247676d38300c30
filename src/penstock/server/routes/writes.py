"""Writes by batch: stage pieces, commit or drop a batch, and describe a producer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import pyarrow as pa

from penstock.api.access import AccessPart
from penstock.api.rows import CheckedRows
from penstock.model.errors import InvalidArgument, PenstockError, TooLarge
from penstock.model.limits import MAX_COMMIT_PARTS, MIB, Limits
from penstock.model.names import clean_name
from penstock.model.principals import Principal
from penstock.model.scopes import Scope, plain_name
from penstock.model.tenancy import Path
from penstock.model.writes import (
    CommitBatch,
    CommitReport,
    PartCommit,
    PieceName,
    PieceReport,
    RowTarget,
    WriterReport,
)
from penstock.server.access import Needs, check_path
from penstock.server.access import check as check_access
from penstock.server.arrow_bodies import STREAM_MARK, read_table
from penstock.server.commands import path_of
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.requests import Request, decode_body, required_index, whole_number
from penstock.server.line_bodies import cache_table, event_table, produce_table
from penstock.server.members import (
    NAME_PATTERN,
    Count,
    NameOrEmpty,
    StrictBody,
    limits,
    optional,
    required,
)
from penstock.server.routes.endpoint import DONE, Answer, Endpoint, names_in_path
from penstock.server.row_checks import check_cache_rows, check_event_rows, check_topic_rows

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

Report = TypeVar("Report", PieceReport, CommitReport, WriterReport)

MAX_COMMIT_BYTES = 4 * MIB
"""The largest body of a commit, which is decoded on the loop."""

_PATH_PART = NAME_PATTERN.replace("[^", "[^/").join((r"\s*", r"\s*"))
_FullPath = Annotated[str, limits(pattern=rf"^$|^{_PATH_PART}/{_PATH_PART}/{_PATH_PART}$")]
_Attempt = Annotated[
    NameOrEmpty | None,
    optional("A name for this try at the part; only one try is committed."),
]


class StageQuery(msgspec.Struct):
    attempt: _Attempt = None
    topic: Annotated[NameOrEmpty | None, optional("The topic of rows without one.")] = None
    cache: Annotated[
        _FullPath | None,
        optional("Puts the rows into this cache instead: <tenant>/<namespace>/<cache>."),
    ] = None
    stream: Annotated[
        _FullPath | None,
        optional(
            "Publishes the rows to this durable stream instead: <tenant>/<namespace>/<stream>."
        ),
    ] = None


class PieceTarget(msgspec.Struct, frozen=True):
    """The topic of rows that name none, or the cache or the stream that all rows are for."""

    topic: str = ""
    cache: Path | None = None
    stream: Path | None = None


class PartBody(StrictBody):
    part: Annotated[Count | None, required("The number of the part in the batch.")] = None
    attempt: _Attempt = None
    pieces: Annotated[Count | None, required("How many pieces the attempt has.")] = None
    rows: Annotated[Count | None, required("How many rows the attempt has in all.")] = None


_Parts = Annotated[list[PartBody], limits(maxItems=MAX_COMMIT_PARTS)]


class CommitBody(StrictBody):
    parts: Annotated[
        _Parts,
        optional("The parts in their order, at most 10,000, each with the attempt to commit."),
    ]
    once: Annotated[
        bool,
        optional("true: the producer will write no other batch, and is forgotten after 7 days."),
    ] = False


_commit_decoder = msgspec.json.Decoder(CommitBody)


def stage(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    _, *names = names_in_path(request)
    params = request.params()
    piece = PieceName(
        request.full_name(names[0], "producer"),
        _number(names[1], "batch"),
        _number(names[2], "part"),
        _attempt(params.get("attempt")),
        _number(names[3], "piece"),
    )
    target = _target(request, params)
    principal, access, scope = request.notes.principal, dispatch.engine.access, request.notes.scope
    approve: Callable[[list[RowTarget]], None] | None = None
    if principal is not None and target.cache is not None:
        check_path(access, principal, "cache_write", "cache", target.cache)
    elif principal is not None and target.stream is not None:
        check_path(access, principal, "publish", "stream", target.stream)
    elif principal is not None:
        approve = partial(_approve, access, principal, scope)
    topic = target.topic
    if target.stream is not None:
        if target.stream[:2] != scope:
            # The quotas of the producer's namespace count the rows.
            raise InvalidArgument(
                f"stream {'/'.join(target.stream)!r} is not in the producer's namespace, "
                f"{'/'.join(scope)}: send the request for the tenant and namespace of the stream"
            )
        topic = dispatch.engine.streams.log_name(target.stream)
    check = partial(_checked, request.body, scope, topic, target, dispatch.engine.limits)
    dispatch.engine.writes.stage(
        piece,
        topic,
        target.cache,
        len(request.body),
        check,
        lambda outcome: send_outcome(reply, outcome, 200, _same),
        approve=approve,
    )


def _approve(
    access: AccessPart, principal: Principal, scope: Scope, targets: list[RowTarget]
) -> None:
    """Raises unless the principal may produce to every topic that rows are for."""
    for name in {plain_name(target.topic) for target in targets}:
        check_access(access, principal, "produce", "topic", scope, name)


def commit(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if len(request.body) > MAX_COMMIT_BYTES:
        raise TooLarge(f"a commit has at most {MAX_COMMIT_BYTES} bytes")
    _, *names = names_in_path(request)
    body = decode_body(_commit_decoder, request.body)
    if len(body.parts) > MAX_COMMIT_PARTS:
        raise TooLarge(f"a batch has at most {MAX_COMMIT_PARTS} parts")
    command = CommitBatch(
        request.full_name(names[0], "producer"),
        _number(names[1], "batch"),
        [_part(part) for part in body.parts],
        body.once,
    )
    dispatch.engine.writes.commit(command, partial(_committed, reply))


def abort(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    _, *names = names_in_path(request)
    producer = request.full_name(names[0], "producer")
    dispatch.engine.writes.abort(producer, _number(names[1], "batch"), reply.settle)


def describe(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    dispatch.engine.writes.describe(
        request.full_name(names_in_path(request)[1], "producer"),
        lambda outcome: send_outcome(reply, outcome, 200, _same),
    )


def _committed(reply: Reply, outcome: CommitReport | PenstockError) -> None:
    status = 202 if isinstance(outcome, CommitReport) and outcome.status == "storing" else 200
    send_outcome(reply, outcome, status, _same)


def _checked(
    body: bytes, scope: Scope, topic: str, target: PieceTarget, limits: Limits, now_ms: int
) -> CheckedRows:
    """Runs on a thread: returns the rows of the body, or raises if they cannot be written. `topic`
    is that of rows that name none, or the log of the stream."""
    if target.stream is not None:
        table = _table(body, event_table, limits.max_body_bytes)
        return check_event_rows(table, topic, limits.max_message_bytes)
    if target.cache is not None:
        table = _table(body, cache_table, limits.max_body_bytes)
        return check_cache_rows(table, limits.max_message_bytes)
    table = _table(body, produce_table, limits.max_body_bytes)
    return check_topic_rows(table, scope, topic, limits.max_message_bytes, now_ms)


def _table(body: bytes, of_lines: Callable[[bytes], pa.Table], max_bytes: int) -> pa.Table:
    is_arrow = body.startswith(STREAM_MARK)
    return read_table(body, max_bytes) if is_arrow else of_lines(body)


_TARGETS = ("topic", "cache", "stream")


def _target(request: Request, params: dict[str, str]) -> PieceTarget:
    given = [name for name in _TARGETS if params.get(name)]
    if len(given) > 1:
        both = f"{' and '.join(given)} are {'both' if len(given) == 2 else 'all'} given"
        raise InvalidArgument(f"{both}; a piece goes to one of them")
    if params.get("cache"):
        return PieceTarget(cache=_path(params["cache"], "cache"))
    if params.get("stream"):
        return PieceTarget(stream=_path(params["stream"], "stream"))
    topic = params.get("topic", "")
    return PieceTarget(request.full_name(topic) if topic.strip() else "")


def _path(text: str, kind: str) -> Path:
    parts = text.split("/")
    if len(parts) != 3:
        raise InvalidArgument(f"{kind} is <tenant>/<namespace>/<{kind}>")
    return path_of(parts[0], parts[1], parts[2], kind)


def _part(body: PartBody) -> PartCommit:
    return PartCommit(
        required_index(body.part, "part"),
        _attempt(body.attempt),
        required_index(body.pieces, "pieces"),
        required_index(body.rows, "rows"),
    )


def _attempt(raw: str | None) -> str:
    return clean_name(raw, "attempt") if raw and raw.strip() else ""


def _number(text: str, name: str) -> int:
    return required_index(whole_number({name: text}, name), name)


def _same(report: Report) -> Report:
    return report


ENDPOINTS = (
    Endpoint(
        route="PUT /v1/writes/{producer}/{batch}/{part}/{piece}",
        handler=stage,
        access=Needs("write", "producer"),
        tag="Writes",
        summary="Stage a piece of a batch",
        text="The body is an Arrow IPC stream of rows, or lines of JSON, each the body of a "
        "produce. Its rows are invisible until the batch is committed. A piece that is sent "
        "again replaces the first. Every row is checked now, and an error names the row.",
        query=(StageQuery,),
        example={"attempt": "a", "topic": "orders"},
        answers={200: Answer("It is on disk.", PieceReport, {"rows": 1000, "bytes": 131_072})},
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Endpoint(
        route="POST /v1/writes/{producer}/{batch}/commit",
        handler=commit,
        access=Needs("write", "producer"),
        tag="Writes",
        summary="Commit a batch",
        text="Stores the rows of these parts exactly once. The numbers of a producer's batches "
        "rise: a batch that is not above the last is already committed, and is not stored "
        "again. 409 if the parts are not what is staged; 429 if a partition is full.",
        body=CommitBody,
        example={"parts": [{"part": 0, "attempt": "a", "pieces": 1, "rows": 1000}], "once": False},
        answers={
            200: Answer(
                "Every row is stored and durable.",
                CommitReport,
                {"status": "committed", "rows": 1000},
            ),
            202: Answer(
                "Committed, but not all rows are stored after 20 seconds; ask again.",
                CommitReport,
                {"status": "storing", "rows": 5_000_000, "done": 4_000_000},
            ),
        },
        errors=(400, 409, 413, 429, 503),
    ),
    Endpoint(
        route="DELETE /v1/writes/{producer}/{batch}",
        handler=abort,
        access=Needs("write", "producer"),
        tag="Writes",
        summary="Drop the staged pieces of a batch",
        text="A batch that is committed stays.",
        answers=DONE,
        errors=(400, 503),
    ),
    Endpoint(
        route="GET /v1/writes/{producer}",
        handler=describe,
        access=Needs("write", "producer"),
        tag="Writes",
        summary="Describe a producer",
        text="404 if the producer has committed nothing, or its last commit is too long ago.",
        answers={
            200: Answer(
                "Its last batch.",
                WriterReport,
                {
                    "producer": "nightly",
                    "last_batch": 7,
                    "rows": 1000,
                    "committed_at_ms": 1_767_225_600_000,
                    "storing": False,
                },
            )
        },
        errors=(400, 404, 503),
    ),
)
