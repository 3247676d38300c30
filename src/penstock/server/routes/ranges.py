"""Ranges of a partition, as an Arrow stream or as lines of JSON; and the offsets of topics.

The next piece is read when the connection has taken the one before and there is memory for another.
So a slow reader costs one piece, and all readers together no more than the budget for answers. A
read that fails after it began ends without an end mark, so that nobody takes half a range for a
whole one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.model.audit import AUDIT_TOPIC
from penstock.model.errors import InvalidArgument, PenstockError, PermissionDenied
from penstock.model.limits import MAX_OFFSET
from penstock.model.ranges import (
    NamedOffsets,
    OffsetsPage,
    RangeFormat,
    RangeRequest,
    Selection,
    TopicOffsets,
)
from penstock.model.splits import MAX_SPLIT_ROWS, SPLIT_ROWS, SplitRequest, Splits
from penstock.server.access import Filtered, Needs, audit_tenant, guard_of, seen, sees
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.range_stream import RangeStream
from penstock.server.http.requests import Request, not_negative, whole_number
from penstock.server.http.responses import NDJSON_TYPE
from penstock.server.http.streamed_response import check_streamable
from penstock.server.members import Position, limits, optional
from penstock.server.routes.endpoint import Answer, Endpoint, names_in_path

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_FORMATS: dict[str, tuple[RangeFormat, bytes]] = {
    "arrow": ("arrow", b"content-type: application/vnd.apache.arrow.stream\r\n"),
    "ndjson": ("ndjson", NDJSON_TYPE),
}

TopicId = Annotated[
    Position | None,
    optional(
        "The id that the topic must have, so that a topic created later under the same "
        "name is not meant."
    ),
]
Columns = Annotated[
    str | None, optional("Names of columns, separated by commas; omitted, all columns.")
]
Format = Annotated[
    Annotated[str, limits(enum=["", *_FORMATS])] | None,
    optional("arrow or ndjson. With ndjson a row is an object of the columns that are not null."),
]
SplitRows = Annotated[
    Annotated[int, limits(minimum=1, maximum=MAX_SPLIT_ROWS)] | None,
    optional("The most rows of a split, 1 to 10,000,000; 131,072 when omitted."),
]
AllSplitRows = Annotated[
    Annotated[int, limits(minimum=1, maximum=MAX_OFFSET)] | None,
    optional("The most rows of all splits together; omitted, all rows."),
]
TimeMs = Annotated[Position | None, optional("A time in milliseconds since 1970.")]
_Start = Annotated[Position | None, optional("The first offset; omitted, the oldest that is kept.")]
_End = Annotated[
    Position | None, optional("The offset to end before; omitted, the end of the partition now.")
]


class RangeQuery(msgspec.Struct):
    topic_id: TopicId = None
    start: _Start = None
    end: _End = None
    columns: Columns = None
    nulls: Annotated[
        Annotated[str, limits(enum=["keep", "omit"])] | None,
        optional("keep, or omit: leaves out columns that are sealed and null in the whole range."),
    ] = None
    run_id: Annotated[str | None, optional("Only messages of this run.")] = None
    tenant_id: Annotated[str | None, optional("Only messages of this tenant.")] = None
    from_ms: Annotated[
        Position | None,
        optional("Only messages produced at this time or later, in milliseconds since 1970."),
    ] = None
    to_ms: Annotated[Position | None, optional("Only messages produced before this time.")] = None
    format: Format = None


class SplitsQuery(msgspec.Struct):
    topic_id: TopicId = None
    start: _Start = None
    end: _End = None
    rows: SplitRows = None
    max_rows: AllSplitRows = None


class OffsetsQuery(msgspec.Struct):
    time_ms: TimeMs = None


class AllOffsetsQuery(msgspec.Struct):
    after: Annotated[str | None, optional("Where to begin: after of the previous page.")] = None


_READ = Needs("read", "topic")


def read_range(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    topic, partition = _topic_and_partition(request)
    params = request.params()
    name, content_type = format_of(params)
    wanted = RangeRequest(
        topic=request.full_name(topic),
        partition=_partition(partition),
        topic_id=not_negative(params, "topic_id"),
        start=not_negative(params, "start"),
        end=not_negative(params, "end"),
        format=name,
        omit_nulls=_omits_nulls(params),
        selection=Selection(
            columns=columns_of(params),
            tenant_id=_tenant_of_rows(dispatch, request, topic, params.get("tenant_id", "")),
            run_id=params.get("run_id", ""),
            from_ms=not_negative(params, "from_ms"),
            to_ms=not_negative(params, "to_ms"),
        ),
    )
    stream = RangeStream(reply, guard_of(_READ, dispatch, request, reply), content_type)
    reply.when_first(lambda: dispatch.engine.ranges.open(wanted, stream.opened))


def _tenant_of_rows(dispatch: RequestDispatch, request: Request, topic: str, asked: str) -> str:
    """Returns the tenant whose rows are shown; empty for all. Of the audit log, a principal sees
    the rows of its tenant only, unless it may see all."""
    notes = request.notes
    if topic.strip() != AUDIT_TOPIC or notes.principal is None:
        return asked
    own = audit_tenant(dispatch.engine.access, notes.principal, notes.scope) or ""
    if own and asked not in ("", own):
        raise PermissionDenied(f"the audit log shows {notes.principal.name!r} the rows of {own!r}")
    return own or asked


def read_splits(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    topic, partition = _topic_and_partition(request)
    send_splits(
        dispatch, request, reply, request.full_name(topic), _partition(partition), "topic_id"
    )


def send_splits(
    dispatch: RequestDispatch,
    request: Request,
    reply: Reply,
    topic: str,
    partition: int,
    id_member: str,
) -> None:
    """Answers with the splits of the range that the query names; `id_member` has the topic's id."""
    params = request.params()
    rows, max_rows = split_sizes(params)
    wanted = SplitRequest(
        topic=topic,
        partition=partition,
        topic_id=not_negative(params, id_member),
        start=not_negative(params, "start"),
        end=not_negative(params, "end"),
        rows=rows,
        max_rows=max_rows,
    )
    dispatch.engine.ranges.splits(
        wanted, lambda outcome: send_outcome(reply, outcome, 200, lambda splits: splits)
    )


def read_offsets(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    topic = names_in_path(request)[1]
    time_ms = not_negative(request.params(), "time_ms")
    dispatch.engine.ranges.offsets(
        request.full_name(topic),
        time_ms,
        lambda outcome: send_outcome(reply, outcome, 200, lambda offsets: offsets),
    )


def read_all_offsets(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    notes, access = request.notes, dispatch.engine.access
    shown: list[NamedOffsets] = []

    def send(outcome: OffsetsPage | PenstockError) -> None:
        if isinstance(outcome, PenstockError) or notes.principal is None:
            send_outcome(reply, outcome, 200, lambda page: page)
            return
        shown.extend(
            seen(access, notes, "topic", outcome.topics, lambda each: (notes.scope, each.topic))
        )
        after = outcome.after
        if after is None or sees(access, notes, "topic", notes.scope, after):
            reply.send_json(200, OffsetsPage(shown, after))
        else:
            # The page ends with a name that the principal must not see: add the next page.
            dispatch.engine.ranges.all_offsets(notes.scope, after, send)

    dispatch.engine.ranges.all_offsets(notes.scope, request.params().get("after", ""), send)


def columns_of(params: dict[str, str]) -> tuple[str, ...]:
    return tuple(column for column in params.get("columns", "").split(",") if column)


def format_of(params: dict[str, str]) -> tuple[RangeFormat, bytes]:
    """Returns the format that was asked for, and its content type."""
    name = params.get("format") or "arrow"
    if name not in _FORMATS:
        raise InvalidArgument(f"unknown format {name!r}; there are {', '.join(_FORMATS)}")
    return _FORMATS[name]


def split_sizes(params: dict[str, str]) -> tuple[int, int]:
    """The most rows of each split, and of all together."""
    rows = whole_number(params, "rows")
    max_rows = whole_number(params, "max_rows")
    if rows is not None and not 1 <= rows <= MAX_SPLIT_ROWS:
        raise InvalidArgument(f"rows must be between 1 and {MAX_SPLIT_ROWS}")
    if max_rows is not None and not 1 <= max_rows <= MAX_OFFSET:
        raise InvalidArgument(f"max_rows must be between 1 and {MAX_OFFSET}")
    return rows or SPLIT_ROWS, max_rows or MAX_OFFSET


def _topic_and_partition(request: Request) -> tuple[str, str]:
    _, topic, _, partition, _ = names_in_path(request)
    return topic, partition


def _omits_nulls(params: dict[str, str]) -> bool:
    choice = params.get("nulls", "keep")
    if choice not in ("keep", "omit"):
        raise InvalidArgument(f"nulls takes keep or omit, not {choice!r}")
    return choice == "omit"


def _partition(text: str) -> int:
    index = whole_number({"partition": text}, "partition")
    if index is None:
        raise InvalidArgument("partition must be a whole number")
    return index


ENDPOINTS = (
    Endpoint(
        route="GET /v1/topics/{topic}/partitions/{partition}/records",
        handler=read_range,
        access=_READ,
        tag="Ranges",
        summary="Read a range of a partition",
        text="Needs no lease and no group, and can be read any number of times. The range is "
        "fixed when the answer begins, and has only durable messages. An answer that breaks "
        "off does not look complete.",
        query=(RangeQuery,),
        example={"start": 0, "columns": "offset,value", "format": "ndjson"},
        answers={
            200: Answer(
                "The rows, as an Arrow IPC stream or as lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=(400, 404, 410, 416, 503),
    ),
    Endpoint(
        route="GET /v1/topics/{topic}/partitions/{partition}/splits",
        handler=read_splits,
        access=Needs("read", "topic"),
        tag="Ranges",
        summary="Split a range for parallel reading",
        text="Splits the range into neighbouring ranges with at most so many rows, to be read "
        "in parallel. They cover the whole range, or as much of it as max_rows and 10,000 "
        "splits allow.",
        query=(SplitsQuery,),
        example={"rows": 65536},
        answers={
            200: Answer(
                "The ranges, and where the last of them ends.",
                Splits,
                {"splits": [{"start": 0, "end": 13, "rows": 7}], "next": 13},
            )
        },
        errors=(400, 404, 410, 416, 503),
    ),
    Endpoint(
        route="GET /v1/topics/{topic}/offsets",
        handler=read_offsets,
        access=Needs("read", "topic"),
        tag="Ranges",
        summary="First and next offsets of a topic",
        text="With time_ms, also the first offset of that time. A topic that is deleted and "
        "created again has another topic_id.",
        query=(OffsetsQuery,),
        answers={
            200: Answer(
                "Every partition.",
                TopicOffsets,
                {"topic_id": 3, "partitions": [{"partition": 0, "earliest": 0, "next": 13}]},
            )
        },
        errors=(400, 404, 503),
    ),
    Endpoint(
        route="GET /v1/offsets",
        handler=read_all_offsets,
        access=Filtered("topic"),
        tag="Ranges",
        summary="First and next offsets of all topics",
        text="Topics in the order of their names, some thousands of partitions per page. If "
        "there are more, send after of this page to get the next.",
        query=(AllOffsetsQuery,),
        answers={
            200: Answer(
                "Every partition of some topics.",
                OffsetsPage,
                {
                    "topics": [
                        {
                            "topic": "orders",
                            "topic_id": 3,
                            "partitions": [{"partition": 0, "earliest": 0, "next": 13}],
                        }
                    ],
                    "after": "orders",
                },
            )
        },
        errors=(400, 503),
    ),
)
