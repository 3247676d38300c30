"""Streams: publish, subscribe, and list the subscriptions. The route gives the stream's path."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec

from penstock.model.errors import InvalidArgument, PenstockError
from penstock.model.streams import Lag
from penstock.model.tenancy import Path
from penstock.server.commands import subscribe_of
from penstock.server.http.dispatch import RequestDispatch
from penstock.server.http.feeds import open_feed
from penstock.server.http.requests import Request, check_raw_only, truth, whole_number
from penstock.server.http.responses import encode_json
from penstock.server.members import Count, limits, optional
from penstock.server.message_actions import publish, publish_batch
from penstock.server.routes.endpoint import Answer, Endpoint
from penstock.server.routes.websocket import send_answer
from penstock.server.websocket.answers import Event, PublishOk
from penstock.server.websocket.decoding import decode_body, query_request_id
from penstock.server.websocket.messages import (
    ABSENT,
    ACK,
    EVENT_QUEUE_DEPTH,
    INVALIDATE,
    LAG,
    PublishBatchBody,
    PublishBody,
    QueueDepth,
    RequestIdText,
)

if TYPE_CHECKING:
    from penstock.server.http.response_order import Reply

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


class SubscribeQuery(msgspec.Struct):
    event_queue_depth: Annotated[QueueDepth | None, EVENT_QUEUE_DEPTH] = None
    lag: Annotated[bool | None, LAG] = None
    format: FeedFormatName = None
    heartbeat_ms: FeedHeartbeat = None


class Subscriptions(msgspec.Struct):
    subscriptions: list[Lag]


_publish_decoder = msgspec.json.Decoder(PublishBody)
_publish_batch_decoder = msgspec.json.Decoder(PublishBatchBody)


def post_publish(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    body = (request.query and _raw_publish(request)) or decode_body(_publish_decoder, request.body)
    publish(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def _raw_publish(request: Request) -> PublishBody | None:
    """The request's body as the payload, and the rest from the query; None if it is not raw.
    `invalidate` may be repeated."""
    params = request.params()
    if not truth(params, "raw"):
        check_raw_only(params, ("ack", "invalidate", "request_id"))
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
    )


def post_publish_batch(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    body = decode_body(_publish_batch_decoder, request.body)
    publish_batch(dispatch.engine, path, body, partial(send_answer, reply, body.request_id))


def subscribe(path: Path, dispatch: RequestDispatch, request: Request, reply: Reply) -> None:
    params = request.params()
    feed = open_feed(dispatch, request, params, reply)
    depth = whole_number(params, "event_queue_depth")
    command = subscribe_of(path, depth, truth(params, "lag"))
    reply.when_first(partial(dispatch.engine.streams.subscribe, command, feed, feed.subscribed))


def list_subscriptions(
    path: Path, dispatch: RequestDispatch, request: Request, reply: Reply
) -> None:
    dispatch.engine.streams.subscriptions(path, partial(_send_list, reply))


def _send_list(reply: Reply, outcome: list[Lag] | PenstockError) -> None:
    if isinstance(outcome, PenstockError):
        reply.send_error(outcome)
    else:
        reply.send_json(200, Subscriptions(outcome))


_ERRORS = (400, 404, 413, 429, 503)
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
        scope="stream",
        tag="Streams",
        summary="Publish an event",
        text="Sends the event once to everybody who is subscribed now; it is not kept. The "
        "answer does not wait for subscribers. With raw=true the body is the payload, and the "
        "query has the other members; without raw=true such a query is refused.",
        body=PublishBody,
        query=(RawPublishQuery,),
        example={"payload": "aGVsbG8="},
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok"})},
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"POST {STREAM}/publish_batch",
        handler=post_publish_batch,
        scope="stream",
        tag="Streams",
        summary="Publish events together",
        text="Accepts all events in their order, or none. 1 to 10,000 events. With ack "
        "per_message the answer is an array with one publish_ok per event.",
        body=PublishBatchBody,
        example={"payloads": ["b25l", "dHdv"]},
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok", "count": 2})},
        errors=_ERRORS,
    ),
    Endpoint(
        route=f"GET {STREAM}/subscribe",
        handler=subscribe,
        scope="stream",
        tag="Streams",
        summary="Subscribe as a stream of lines",
        text="One JSON object per line: first subscribed, then every event that is accepted "
        "from then on. With format=sse or Accept: text/event-stream, server-sent events. A "
        "subscriber that is further behind than event_queue_depth loses the newest events. If "
        "the broker ends the subscription, the last line is an error.",
        query=(SubscribeQuery,),
        example={"heartbeat_ms": 15000},
        answers={
            200: Answer(
                "Events, until either side ends the subscription.",
                Event,
                _EVENT,
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 503),
    ),
    Endpoint(
        route=f"GET {STREAM}/subscriptions",
        handler=list_subscriptions,
        scope="stream",
        tag="Streams",
        summary="List the subscriptions and their lag",
        answers={200: Answer("All subscriptions.", Subscriptions, {"subscriptions": [_LAG]})},
        errors=(400, 404, 503),
    ),
)
