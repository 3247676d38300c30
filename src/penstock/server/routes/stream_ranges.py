"""Ranges of a durable stream: its events as an Arrow stream or as lines of JSON, their splits and
offsets, and the progress of those who read them.

The events are the rows of the topic that keeps them, so everything here is done by the code that
reads ranges of topics. Users see neither that topic nor its only partition.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.names import clean_name
from penstock.model.ranges import (
    EVENT_COLUMNS,
    RangeRequest,
    Selection,
    StreamOffsets,
    TopicOffsets,
)
from penstock.model.splits import Splits
from penstock.model.tenancy import Path
from penstock.server.access import Needs, guard_of
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.range_stream import RangeStream
from penstock.server.http.requests import Request, decode_body, not_negative, required_index
from penstock.server.http.streamed_response import check_streamable
from penstock.server.members import Count, Position, StrictBody, optional, required
from penstock.server.routes.endpoint import DURABLE_EXAMPLE, Answer, Endpoint, names_in_path
from penstock.server.routes.ranges import (
    AllSplitRows,
    Columns,
    Format,
    SplitRows,
    TimeMs,
    columns_of,
    format_of,
    send_splits,
)
from penstock.server.routes.streams import STREAM
from penstock.server.websocket.messages import StreamId

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_READ = Needs("subscribe", "stream")

_Start = Annotated[Position | None, optional("The first offset; omitted, the oldest that is kept.")]
_End = Annotated[
    Position | None, optional("The offset to end before; omitted, the end of the stream now.")
]


class EventRangeQuery(msgspec.Struct):
    stream_id: StreamId = None
    start: _Start = None
    end: _End = None
    columns: Columns = None
    from_ms: Annotated[
        Position | None,
        optional("Only events published at this time or later, in milliseconds since 1970."),
    ] = None
    to_ms: Annotated[Position | None, optional("Only events published before this time.")] = None
    format: Format = None


class EventSplitsQuery(msgspec.Struct):
    stream_id: StreamId = None
    start: _Start = None
    end: _End = None
    rows: SplitRows = None
    max_rows: AllSplitRows = None


class EventOffsetsQuery(msgspec.Struct):
    time_ms: TimeMs = None


class SubscriptionProgressBody(StrictBody):
    stream_id: StreamId = None
    next: Annotated[
        Count | None, required("Everything below this offset is done for the subscription.")
    ] = None


class SubscriptionProgress(msgspec.Struct):
    next: int


_progress = msgspec.json.Decoder(SubscriptionProgressBody)


def read_events(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    params = request.params()
    name, content_type = format_of(params)
    wanted = RangeRequest(
        topic=dispatch.engine.streams.log_name(path),
        partition=0,
        topic_id=not_negative(params, "stream_id"),
        start=not_negative(params, "start"),
        end=not_negative(params, "end"),
        format=name,
        selection=Selection(
            columns=_event_columns(params),
            from_ms=not_negative(params, "from_ms"),
            to_ms=not_negative(params, "to_ms"),
        ),
    )
    stream = RangeStream(reply, guard_of(_READ, dispatch, request, reply), content_type)
    reply.when_first(lambda: dispatch.engine.ranges.open(wanted, stream.opened))


def read_event_splits(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    log_name = dispatch.engine.streams.log_name(path)
    send_splits(dispatch, request, reply, log_name, 0, "stream_id")


def read_event_offsets(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    dispatch.engine.ranges.offsets(
        dispatch.engine.streams.log_name(path),
        not_negative(request.params(), "time_ms"),
        lambda outcome: send_outcome(reply, outcome, 200, _stream_offsets),
    )


def set_subscription_progress(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    """Sets a subscription's progress, for readers that keep their position elsewhere."""
    name = clean_name(names_in_path(request)[-2], "name")
    body = decode_body(_progress, request.body)
    at = required_index(body.next, "next")
    dispatch.engine.streams.advance(path, name, at, partial(_send_progress, reply), body.stream_id)


def _send_progress(reply: Reply, outcome: int | PenstockError) -> None:
    send_outcome(reply, outcome, 200, SubscriptionProgress)


def _stream_offsets(found: TopicOffsets) -> StreamOffsets:
    (report,) = found.partitions
    return StreamOffsets(found.topic_id, report.earliest, report.next, report.at_time)


def _event_columns(params: dict[str, str]) -> tuple[str, ...]:
    columns = columns_of(params)
    unknown = sorted(set(columns) - set(EVENT_COLUMNS))
    if unknown:
        raise InvalidArgument(
            f"unknown columns {', '.join(unknown)}; events have {', '.join(EVENT_COLUMNS)}"
        )
    return columns or EVENT_COLUMNS


_ERRORS = (400, 404, 409, 410, 416, 503)

ENDPOINTS = (
    Endpoint(
        route=f"GET {STREAM}/records",
        handler=read_events,
        access=_READ,
        scope="stream",
        tag="Streams",
        summary="Read a range of a durable stream",
        text="Needs no subscription, and can be read any number of times. The range is fixed "
        "when the answer begins, and has only durable events. An answer that breaks off does "
        "not look complete. 409 if the stream is not durable.",
        query=(EventRangeQuery,),
        example={"start": 0, "format": "ndjson"},
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer(
                "The events, as an Arrow IPC stream or as lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"GET {STREAM}/splits",
        handler=read_event_splits,
        access=_READ,
        scope="stream",
        tag="Streams",
        summary="Split a range of a durable stream for parallel reading",
        text="Splits the range into neighbouring ranges with at most so many events, to be read "
        "in parallel. They cover the whole range, or as much of it as max_rows and 10,000 "
        "splits allow. 409 if the stream is not durable.",
        query=(EventSplitsQuery,),
        example={"rows": 65536},
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer(
                "The ranges, and where the last of them ends.",
                Splits,
                {"splits": [{"start": 0, "end": 7, "rows": 7}], "next": 7},
            )
        },
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"GET {STREAM}/offsets",
        handler=read_event_offsets,
        access=_READ,
        scope="stream",
        tag="Streams",
        summary="First and next offset of a durable stream",
        text="With time_ms, also the first offset of that time. A stream that is deleted and "
        "created again has another stream_id. 409 if the stream is not durable.",
        query=(EventOffsetsQuery,),
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer("The offsets.", StreamOffsets, {"stream_id": 3, "earliest": 0, "next": 7})
        },
        errors=(400, 404, 409, 503),
    ),
    Endpoint(
        route=f"POST {STREAM}/subscriptions/{{subscription}}/progress",
        handler=set_subscription_progress,
        access=Needs("manage", "stream"),
        scope="stream",
        tag="Streams",
        summary="Publish the progress of a named subscription",
        text="Everything below this offset is done for the subscription, deliveries included. "
        "For readers of ranges, which count their progress themselves. Progress only goes "
        "forward. Creates the subscription if there is none.",
        body=SubscriptionProgressBody,
        example={"next": 0},
        path_examples=DURABLE_EXAMPLE,
        answers={200: Answer("Its progress now.", SubscriptionProgress, {"next": 1})},
        errors=(400, 404, 409, 416, 429, 503),
    ),
)
