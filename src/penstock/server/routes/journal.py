"""The journal: read its rows, its positions and its splits, and say how far it is archived."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.model.access import VisibleTopics
from penstock.model.errors import InvalidArgument, PermissionDenied
from penstock.model.journal import (
    KINDS,
    RESOURCE_KINDS,
    STREAM,
    TOPIC,
    JournalArchive,
    JournalReport,
    JournalRequest,
    JournalSelection,
)
from penstock.model.splits import Splits
from penstock.server.access import HandlerNeeds, Needs, visible_topics
from penstock.server.http.dispatch import RequestDispatch, send_outcome
from penstock.server.http.range_stream import RangeStream
from penstock.server.http.requests import Request, decode_body, not_negative, truth
from penstock.server.http.streamed_response import Guard, check_streamable
from penstock.server.members import Count, Position, StrictBody, limits, optional, required
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.ranges import (
    AllSplitRows,
    Columns,
    Format,
    SplitRows,
    TimeMs,
    columns_of,
    format_of,
    split_sizes,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_From = Annotated[
    Position | None, optional("The first position; omitted, the oldest that is kept.")
]
_To = Annotated[
    Position | None, optional("The position to end before; omitted, the end of the journal now.")
]
_Kind = Annotated[str, limits(enum=["", *KINDS])]
_ResourceKind = Annotated[str, limits(enum=["", *RESOURCE_KINDS])]


class JournalQuery(msgspec.Struct, rename={"start": "from", "end": "to"}):
    start: _From = None
    end: _To = None
    columns: Columns = None
    kind: Annotated[_Kind | None, optional("Only events of this kind, such as acked.")] = None
    topic: Annotated[str | None, optional("Only events of this topic.")] = None
    stream: Annotated[
        str | None, optional("Only events of this durable stream; not together with topic.")
    ] = None
    resource_kind: Annotated[
        _ResourceKind | None, optional("Only events of topics, or only of durable streams.")
    ] = None
    group: Annotated[str | None, optional("Only events of this group.")] = None
    run_id: Annotated[str | None, optional("Only messages of this run.")] = None
    tenant_id: Annotated[str | None, optional("Only messages of this tenant.")] = None
    from_ms: Annotated[
        Position | None,
        optional("Only events at this time or later, in milliseconds since 1970."),
    ] = None
    to_ms: Annotated[Position | None, optional("Only events before this time.")] = None
    format: Format = None


class JournalSplitsQuery(msgspec.Struct, rename={"start": "from", "end": "to"}):
    start: _From = None
    end: _To = None
    rows: SplitRows = None
    max_rows: AllSplitRows = None


class JournalOffsetsQuery(msgspec.Struct):
    fresh: Annotated[
        bool | None,
        optional(
            "true: makes everything that is durable now readable first, which may take a while."
        ),
    ] = None
    time_ms: TimeMs = None


class ArchivedBody(StrictBody):
    next: Annotated[
        Count | None,
        required("Everything below this offset, or position of the journal, is done."),
    ] = None


_decoder = msgspec.json.Decoder(ArchivedBody)


def read_journal(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    check_streamable(dispatch, request)
    params = request.params()
    visible = visible_topics(dispatch.engine.access, request.notes)
    name, content_type = format_of(params)
    resource_kind, resource = _resource(params)
    wanted = JournalRequest(
        start=not_negative(params, "from"),
        end=not_negative(params, "to"),
        format=name,
        selection=JournalSelection(
            columns=columns_of(params),
            kind=_kind(params.get("kind", "")),
            topic=resource,
            resource_kind=resource_kind,
            group=params.get("group", ""),
            tenant=request.notes.tenant or "",
            namespace=request.notes.namespace or "",
            tenant_id=params.get("tenant_id", ""),
            run_id=params.get("run_id", ""),
            from_ms=not_negative(params, "from_ms"),
            to_ms=not_negative(params, "to_ms"),
            visible=visible,
        ),
    )
    guard: Guard = None
    if request.notes.principal is not None:
        guard = partial(_check_visible, dispatch, request, visible)
    stream = RangeStream(reply, guard, content_type)
    reply.when_first(lambda: dispatch.engine.journal.open(wanted, stream.opened))


def _check_visible(
    dispatch: RequestDispatch, request: Request, visible: VisibleTopics | None
) -> None:
    """Raises if the principal may read other rows now than when the read began."""
    if visible_topics(dispatch.engine.access, request.notes) != visible:
        raise PermissionDenied("the access rules have changed; read the journal again")


def read_positions(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    visible_topics(dispatch.engine.access, request.notes)
    params = request.params()
    dispatch.engine.journal.offsets(
        truth(params, "fresh"),
        not_negative(params, "time_ms"),
        lambda outcome: send_outcome(reply, outcome, 200, lambda report: report),
    )


def read_splits(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    visible_topics(dispatch.engine.access, request.notes)
    params = request.params()
    rows, max_rows = split_sizes(params)
    dispatch.engine.journal.splits(
        not_negative(params, "from"),
        not_negative(params, "to"),
        rows,
        max_rows,
        lambda outcome: send_outcome(reply, outcome, 200, lambda splits: splits),
    )


def set_archived(dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    if (request.notes.tenant, request.notes.namespace) != (None, None):
        raise InvalidArgument(
            "the archived position is that of the whole journal, with the rows of all tenants: "
            "report it without X-Penstock-Tenant and X-Penstock-Namespace"
        )
    next_ = decode_body(_decoder, request.body).next
    if next_ is None or next_ < 0:
        raise InvalidArgument("next is required: a position of the journal, 0 or more")
    dispatch.engine.journal.set_archived(
        next_,
        lambda outcome: send_outcome(reply, outcome, 200, lambda archive: archive),
    )


def _kind(name: str) -> str:
    if name and name not in KINDS:
        raise InvalidArgument(f"unknown kind {name!r}; there are {', '.join(KINDS)}")
    return name


def _resource(params: Mapping[str, str]) -> tuple[str, str]:
    """Returns the kind of the resources whose rows are wanted, and the name of the only one; empty
    for any. A name always has its kind: a topic and a stream may have the same name."""
    kind = params.get("resource_kind", "")
    if kind and kind not in RESOURCE_KINDS:
        choices = ", ".join(RESOURCE_KINDS)
        raise InvalidArgument(f"unknown resource_kind {kind!r}; there are {choices}")
    topic, stream = params.get("topic", ""), params.get("stream", "")
    if topic and stream:
        raise InvalidArgument("topic and stream exclude each other: a row is about one of them")
    named = TOPIC if topic else STREAM if stream else kind
    if kind not in ("", named):
        raise InvalidArgument(f"{named} and resource_kind={kind} exclude each other")
    return named, topic or stream


ENDPOINTS = (
    Endpoint(
        route="GET /v1/journal",
        handler=read_journal,
        access=HandlerNeeds("journal", "topic"),
        tag="Journal",
        summary="Read the events of messages",
        text="One row per event, in the order in which they were recorded: its time, kind, "
        "topic or durable stream, group, owner, attempt and reason, the ids of the message's "
        "envelope, and when the message was stored (produced_at) and delivered (delivered_at). "
        "It can be read any number of times. The range is fixed when the answer begins. An "
        "answer that breaks off does not look complete.",
        query=(JournalQuery,),
        example={"kind": "dead_lettered", "format": "ndjson"},
        answers={
            200: Answer(
                "The rows, as an Arrow IPC stream or as lines of JSON.",
                media_type="application/vnd.apache.arrow.stream",
            )
        },
        errors=(400, 409, 410, 416, 503),
    ),
    Endpoint(
        route="GET /v1/journal/offsets",
        handler=read_positions,
        access=HandlerNeeds("journal", "topic"),
        reads_scope=(),
        tag="Journal",
        summary="First and next positions of the journal",
        text="The journal is written when the log is sealed. With fresh, the answer waits "
        "until everything that is durable now can be read. With time_ms, also the first "
        "position of that time.",
        query=(JournalOffsetsQuery,),
        answers={
            200: Answer(
                "The positions.", JournalReport, {"earliest": 268435456, "next": 1342177280}
            )
        },
        errors=(400, 409, 503),
    ),
    Endpoint(
        route="POST /v1/journal/archived",
        handler=set_archived,
        access=Needs("manage", "broker"),
        tag="Journal",
        summary="Say how far the journal is archived",
        text="Says that every row below the position next is kept elsewhere. With the setting "
        "journal_after_archive only such rows are removed. The position never goes back, and "
        "stays the same if there is no row in between; the answer has it.",
        body=ArchivedBody,
        example={"next": 268435456},
        answers={200: Answer("The archived position now.", JournalArchive, {"next": 268435456})},
        errors=(400, 409, 416, 503),
    ),
    Endpoint(
        route="GET /v1/journal/splits",
        handler=read_splits,
        access=HandlerNeeds("journal", "topic"),
        reads_scope=(),
        tag="Journal",
        summary="Split the journal for parallel reading",
        text="Splits the journal into neighbouring ranges with at most so many rows each.",
        query=(JournalSplitsQuery,),
        answers={
            200: Answer(
                "The ranges, and where the last of them ends.",
                Splits,
                {
                    "splits": [{"start": 268435456, "end": 1342177280, "rows": 4711}],
                    "next": 1342177280,
                },
            )
        },
        errors=(400, 409, 410, 416, 503),
    ),
)
