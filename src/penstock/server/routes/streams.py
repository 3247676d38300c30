"""Streams: publish, subscribe, and list the subscriptions. The route gives the stream's path."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from penstock.api.topics import TopicReport
from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.limits import MAX_OFFSET
from penstock.model.streams import Lag, Start
from penstock.model.tenancy import Path
from penstock.server.access import Needs, guard_of
from penstock.server.commands import check_unnamed, named_of, start_of, subscribe_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.feeds import NamedFeed, feed_format, open_feed
from penstock.server.http.requests import Request, check_raw_only, truth, whole_number
from penstock.server.http.responses import encode_json
from penstock.server.members import Count, LeaseTime, limits, optional
from penstock.server.message_access import check_invalidation
from penstock.server.message_actions import publish, publish_batch
from penstock.server.routes.endpoint import DURABLE_EXAMPLE, Answer, Endpoint
from penstock.server.routes.websocket import send_answer
from penstock.server.websocket.answers import Event, PublishOk
from penstock.server.websocket.decoding import decode_body, query_request_id
from penstock.server.websocket.messages import (
    ABSENT,
    ACK,
    EVENT_QUEUE_DEPTH,
    INVALIDATE,
    LAG,
    START,
    OwnerOfName,
    Prefetch,
    ProducerId,
    PublishBatchBody,
    PublishBody,
    QueueDepth,
    RequestIdText,
    Sequence,
    StreamId,
    SubscriptionName,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

_SUBSCRIBE = Needs("subscribe", "stream")

STREAM = "/v1/tenants/{tenant_id}/namespaces/{namespace}/streams/{stream}"

Raw = Annotated[
    bool | None, optional("true: the body is the bytes themselves instead of JSON with base64.")
]
FeedFormatName = Annotated[
    Annotated[str, limits(enum=["", "ndjson", "sse"])] | None,
    optional("ndjson or sse; omitted, the header Accept decides."),
]
FeedHeartbeat = Annotated[
    Count | None,
    optional(
        "How often a blank line, or a comment, is sent; 0 is never. The default is 0, and "
        "15000 for server-sent events."
    ),
]


class RawPublishQuery(msgspec.Struct):
    raw: Raw = None
    ack: Annotated[str | None, ACK] = None
    invalidate: Annotated[str | None, INVALIDATE] = None
    request_id: RequestIdText = None
    producer_id: ProducerId = None
    sequence: Sequence = None


class SubscribeQuery(msgspec.Struct):
    event_queue_depth: Annotated[QueueDepth | None, EVENT_QUEUE_DEPTH] = None
    lag: Annotated[bool | None, LAG] = None
    format: FeedFormatName = None
    heartbeat_ms: FeedHeartbeat = None
    name: SubscriptionName = None
    start: Annotated[str | None, START] = None
    owner: OwnerOfName = None
    lease_ms: LeaseTime = None
    prefetch: Prefetch = None
    stream_id: StreamId = None


class NamedSubscription(msgspec.Struct):
    """The progress of a named subscription. `unacked` events are delivered and not acked."""

    name: str
    subscribers: int
    next_offset: int
    unacked: int
    messages_behind: int


class Subscriptions(msgspec.Struct, omit_defaults=True):
    """`named`, and the offsets of the first event that is kept and of the next one, are there if
    the stream is durable."""

    subscriptions: list[Lag]
    named: list[NamedSubscription] | None = None
    first_offset: int | None = None
    next_offset: int | None = None


NAMED_ONLY = ("owner", "lease_ms", "prefetch")
"""Members that need a name."""

_EVENT_ID = re.compile(rb"(?:(?P<stream_id>[0-9]{1,19})-)?(?P<offset>[0-9]{1,19})")

_publish_decoder = msgspec.json.Decoder(PublishBody)
_publish_batch_decoder = msgspec.json.Decoder(PublishBatchBody)


def post_publish(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_publish(request)) or decode_body(_publish_decoder, request.body)
    if request.notes.principal is not None:
        check_invalidation(dispatch.engine.access, request.notes.principal, path, body)
    publish(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def _raw_publish(request: Request) -> PublishBody | None:
    """The request's body as the payload, and the rest from the query; None if it is not raw.
    `invalidate` may be repeated."""
    params = request.params()
    if not truth(params, "raw"):
        names = ("ack", "invalidate", "request_id", "producer_id", "sequence")
        check_raw_only(params, names)
        return None
    ack = params.get("ack")
    if ack is not None and ack not in ("none", "per_message"):
        raise InvalidArgument("ack must be none or per_message")
    targets = request.every("invalidate")
    return PublishBody(
        payload=request.body,
        ack=cast("Literal['none', 'per_message'] | None", ack),
        request_id=query_request_id(params),
        invalidate=msgspec.Raw(encode_json(targets)) if targets else ABSENT,
        producer_id=params.get("producer_id"),
        sequence=whole_number(params, "sequence"),
    )


def post_publish_batch(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    body = decode_body(_publish_batch_decoder, request.body)
    if request.notes.principal is not None:
        check_invalidation(dispatch.engine.access, request.notes.principal, path, body)
    publish_batch(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def subscribe(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    start, stream_id = _start(request, params)
    streams = dispatch.engine.streams
    guard = guard_of(_SUBSCRIBE, dispatch, request, reply)
    if params.get("name"):
        form, heartbeat_ms = feed_format(dispatch, request, params)
        named = named_of(
            path,
            params["name"],
            params.get("owner"),
            start,
            whole_number(params, "lease_ms"),
            whole_number(params, "prefetch"),
            stream_id,
        )
        sink = NamedFeed(reply, guard, form, heartbeat_ms, named)
        reply.when_first(partial(streams.consume, named, sink, sink.opened))
        return
    check_unnamed(**{member: params.get(member) or None for member in NAMED_ONLY})
    feed = open_feed(dispatch, request, params, reply, guard)
    depth = whole_number(params, "event_queue_depth")
    command = subscribe_of(path, depth, truth(params, "lag"), start, stream_id)
    reply.when_first(partial(streams.subscribe, command, feed, feed.subscribed))


def _start(request: Request, params: dict[str, str]) -> tuple[Start | None, int | None]:
    """Returns where to begin, and the stream_id that the stream must have. A browser that connects
    again names the event that it got last, which counts more than the query it began with."""
    stream_id = whole_number(params, "stream_id")
    last = (request.notes.last_event_id or b"").strip()
    if not last:
        return start_of(params.get("start")), stream_id
    found = _EVENT_ID.fullmatch(last)
    if found is None or int(found["offset"]) >= MAX_OFFSET:
        raise InvalidArgument(
            "Last-Event-ID must be the id of an event: the stream_id, a hyphen, and the offset; or "
            "only the offset, as older brokers sent it"
        )
    start = Start("offset", int(found["offset"]) + 1)
    if found["stream_id"] is None:
        return start, stream_id
    if stream_id not in (None, int(found["stream_id"])):
        raise InvalidArgument("stream_id and Last-Event-ID name different streams")
    return start, int(found["stream_id"])


def list_subscriptions(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    dispatch.engine.streams.subscriptions(path, partial(_send_list, dispatch, path, reply))


def _send_list(
    dispatch: RequestDispatch, path: Path, reply: Reply, outcome: list[Lag] | PenstockError
) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
        return
    try:
        log_name = dispatch.engine.streams.log_name(path)
    except PenstockError:
        reply.send_json(200, Subscriptions(outcome))
    else:
        dispatch.engine.describe_topic(log_name, partial(_send_with_named, reply, outcome))


def _send_with_named(reply: Reply, live: list[Lag], outcome: TopicReport | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
        return
    named = [
        NamedSubscription(
            group.name,
            group.consumers,
            group.partitions[0].next_offset,
            group.partitions[0].unfinished,
            group.partitions[0].lag,
        )
        for group in outcome.groups
    ]
    log = outcome.partitions[0]
    reply.send_json(200, Subscriptions(live, named, log.first_offset, log.next_offset))


_ERRORS = (400, 404, 409, 413, 429, 503)
_EVENT = {"type": "event", "subscription_id": "s1", "payload": "aGVsbG8="}
_LAG = {
    "subscription_id": "s1",
    "messages_behind": 0,
    "dropped": 0,
    "delivered": 17,
    "event_queue_depth": 1024,
    "alert": False,
    "since_ms": 1_767_225_600_000,
}

ENDPOINTS = (
    Endpoint(
        route=f"POST {STREAM}/publish",
        handler=post_publish,
        access=Needs("publish", "stream"),
        scope="stream",
        tag="Streams",
        summary="Publish an event",
        text="Sends the event once to everybody who is subscribed now. The answer does not wait "
        "for subscribers. A durable stream also keeps the event, and answers with its offset when "
        "it is on disk. With raw=true the body is the payload, and the query has the other "
        "members; without raw=true such a query is refused.",
        body=PublishBody,
        query=(RawPublishQuery,),
        example={"payload": "aGVsbG8="},
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok"})},
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"POST {STREAM}/publish_batch",
        handler=post_publish_batch,
        access=Needs("publish", "stream"),
        scope="stream",
        tag="Streams",
        summary="Publish events together",
        text="Accepts all events in their order, or none. 1 to 10,000 events. With ack "
        "per_message the answer is an array with one publish_ok per event.",
        body=PublishBatchBody,
        example={"payloads": ["b25l", "dHdv"]},
        path_examples=DURABLE_EXAMPLE,
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok", "count": 2})},
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"GET {STREAM}/subscribe",
        handler=subscribe,
        access=_SUBSCRIBE,
        scope="stream",
        tag="Streams",
        summary="Subscribe as a stream of lines",
        text="One JSON object per line: first subscribed, then every event that is accepted "
        "from then on. With format=sse or Accept: text/event-stream, server-sent events. A "
        "subscriber that is further behind than event_queue_depth loses the newest events. With "
        "start it reads a durable stream from there on, and loses nothing. With name it joins a "
        "named subscription, whose events are acked. The header Last-Event-ID resumes behind the "
        "event of this id. 410 if the stream does not have the stream_id that the request or the "
        "event's id names. If the broker ends the subscription, the last line is an error.",
        query=(SubscribeQuery,),
        example={"name": "billing", "owner": "w1", "start": "earliest"},
        path_examples=DURABLE_EXAMPLE,
        answers={
            200: Answer(
                "Events, until either side ends the subscription.",
                Event,
                _EVENT,
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 409, 410, 416, 429, 503),
    ),
    Endpoint(
        route=f"GET {STREAM}/subscriptions",
        handler=list_subscriptions,
        access=Needs("read", "stream"),
        scope="stream",
        tag="Streams",
        summary="List the subscriptions and their lag",
        answers={200: Answer("All subscriptions.", Subscriptions, {"subscriptions": [_LAG]})},
        errors=(400, 404, 503),
    ),
)
