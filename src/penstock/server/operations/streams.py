"""Publishing, subscribing and the messages of the WebSocket, described."""

from __future__ import annotations

from penstock.server.answers import Event, Subscriptions
from penstock.server.operations.endpoint import Answer, Operation
from penstock.server.websocket.answers import Ok, PublishOk, Value, Values
from penstock.server.websocket.messages import (
    CacheDeleteMessage,
    CacheGetManyMessage,
    CacheGetMessage,
    CacheIncrMessage,
    CachePutMessage,
    CacheTxnMessage,
    PingMessage,
    PublishBatchBody,
    PublishBatchMessage,
    PublishBody,
    PublishMessage,
)

STREAM = "/v1/tenants/{tenant_id}/namespaces/{namespace}/streams/{stream}"

MESSAGES = (
    PublishMessage
    | PublishBatchMessage
    | CachePutMessage
    | CacheGetMessage
    | CacheGetManyMessage
    | CacheDeleteMessage
    | CacheIncrMessage
    | CacheTxnMessage
    | PingMessage
)
"""Those that need no connection which stays open."""

ANSWERS = Ok | PublishOk | Value | Values

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

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path=f"{STREAM}/publish",
        tag="Streams",
        summary="Publish an event",
        text="It goes once to everybody who subscribes at this moment, and is kept for nobody. "
        "The answer does not wait for subscribers. With raw=true the body is the payload, "
        "and the rest is in the query; without it, a query with these members is refused.",
        body=PublishBody,
        required=("payload",),
        query=("raw", "ack", "invalidate", "request_id"),
        example={"payload": "aGVsbG8="},
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok"})},
        errors=_ERRORS,
    ),
    Operation(
        method="POST",
        path=f"{STREAM}/publish_batch",
        tag="Streams",
        summary="Publish events as one step",
        text="All are accepted in their order, or none. 1 to 10,000. An ack of per_message is "
        "answered with an array of as many publish_ok.",
        body=PublishBatchBody,
        required=("payloads",),
        query=(),
        example={"payloads": ["b25l", "dHdv"]},
        answers={200: Answer("Accepted.", PublishOk, {"type": "publish_ok", "count": 2})},
        errors=_ERRORS,
    ),
    Operation(
        method="GET",
        path=f"{STREAM}/subscribe",
        tag="Streams",
        summary="Subscribe as a stream of lines",
        text="One JSON object a line: subscribed first, then every event that is accepted from "
        "then on. As server-sent events with format=sse or Accept: text/event-stream. Who is "
        "further behind than event_queue_depth loses the newest. An error line, if the broker "
        "ends it.",
        query=("event_queue_depth", "lag", "format", "heartbeat_ms"),
        example={"heartbeat_ms": 15000},
        answers={
            200: Answer(
                "Events, until either side ends it.",
                Event,
                _EVENT,
                media_type="application/x-ndjson",
            )
        },
        errors=(400, 404, 503),
    ),
    Operation(
        method="GET",
        path=f"{STREAM}/subscriptions",
        tag="Streams",
        summary="Who subscribes, and how far behind they are",
        answers={200: Answer("All of them.", Subscriptions, {"subscriptions": [_LAG]})},
        errors=(400, 404, 503),
    ),
    Operation(
        method="POST",
        path="/v1/felix",
        tag="Streams",
        summary="Any message of the WebSocket that needs no connection",
        text="publish, publish_batch, every cache message but the watches, and ping; or an array "
        "of up to 10,000 of them, items of their lists counted, which is answered by an array. All "
        "messages are in /docs/asyncapi.json.",
        body=MESSAGES,
        or_array=True,
        required=("type",),
        query=(),
        example={
            "type": "publish",
            "tenant_id": "default",
            "namespace": "default",
            "stream": "default",
            "payload": "aGVsbG8=",
        },
        answers={
            200: Answer(
                "The message's own answer.", Ok | PublishOk | Value | Values, {"type": "publish_ok"}
            )
        },
        errors=(*_ERRORS, 409, 412),
    ),
    Operation(
        method="GET",
        path="/v1/felix/ws",
        tag="Streams",
        summary="The WebSocket",
        text="Ask for an upgrade, version 13, with subprotocol felix.v1 or felix.v1+binary. What "
        "is said there is in /docs/asyncapi.json.",
        answers={101: Answer("From here on it is a WebSocket.")},
        errors=(400, 426),
    ),
)
